/* The weights as a part of the program: NAME_weights_file is the path of the file, as text. */
#define TEXT(x) #x
#define SIZE(x) TEXT(x)
#if defined(__wasm__)
#define SECTION ".section .rodata.weights,\"\",@\n"
#define DECLARED ".type @NAME@_weights,@object\n.type @NAME@_weights_end,@object\n"
#define SIZES ".size @NAME@_weights,@WEIGHTS_BYTES@\n.size @NAME@_weights_end,1\n"
#define BACK ""
#elif defined(__APPLE__)
#error "expected an ELF or wasm target to link weights in, got another; leave @NAME@_LINK_WEIGHTS off"
#else
#define SECTION ".section .rodata\n"
#define DECLARED ""
#define SIZES ".size @NAME@_weights,@WEIGHTS_BYTES@\n"
#define BACK ".previous\n"
#endif
__asm__(SECTION DECLARED
        ".globl @NAME@_weights\n.globl @NAME@_weights_end\n"
        ".p2align 6\n"
        "@NAME@_weights:\n.incbin \"" @NAME@_WEIGHTS_FILE "\"\n"
        "@NAME@_weights_end:\n.byte 0\n" SIZES BACK);
