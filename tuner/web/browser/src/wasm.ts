/**
 * The WebAssembly module of a model, compiled from its exported C: memory, calls, threads, and readable errors; see
 * tuner/web/wasm.py. It is used in a worker: calls hold its thread.
 */

import { type Manifest, damaged, decode, member } from "./artifact.js";
import { ByteStream, type HashedStream, type Progress, type Source, altered, download, downloadAs, hexadecimal } from "./download.js";
import { ModelError } from "./errors.js";
import { size } from "./gpu.js";
import { type Program, readPrograms } from "./program.js";
import type { Memory } from "./tensor.js";

const MODULE_FORMAT = "relax-tune module";
const SCHEMA = 2;
const ALIGNMENT = 64;
const PIECE = 1 << 20; // bytes of the weights that have a hash of their own
const NO_FILE = 8; // EBADF of WASI
const PAGE = 1 << 16;
const MEMORY = { initial: (16 << 20) / PAGE, maximum: 2 ** 32 / PAGE, shared: true }; // which threads share
const STACK = 1 << 18; // bytes of a thread's stack
const MOST_THREADS = 4;
/** A module whose only function is i8x16.popcnt(i8x16.splat(0)). */
const SIMD = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11];

/** The two downloads of a model: its compiled module, and its weights. threads: at most so many, by default four */
export interface WasmSource {
  module: Source;
  weights: Source;
  threads?: number;
}

/** What a thread starts with. number: its own, from 1; stack: the end of its stack */
export interface ThreadStart {
  module: WebAssembly.Module;
  memory: WebAssembly.Memory;
  stack: number;
  number: number;
}

/** Start a thread; it is ready when the promise is. */
export type StartThread = (start: ThreadStart) => Promise<void>;

/** What the module exports; addresses and sizes are whole numbers of 32 bits. Only the form for threads has the last four. */
interface Exports {
  memory?: WebAssembly.Memory;
  _initialize(): void;
  aligned_alloc(alignment: number, bytes: number): number;
  free(address: number): void;
  model_create(place: number, options: number): number;
  model_reserve(model: number, number: number, symbols: number): number;
  model_run(model: number, number: number, symbols: number, inputs: number, outputs: number): number;
  model_error(model: number): number;
  __stack_pointer?: WebAssembly.Global;
  threads_team?(threads: number): void;
  threads_serve?(number: number): void;
  threads_fail?(): void;
}

/** Memory in the module. */
export class WasmMemory implements Memory {
  constructor(
    private readonly wasm: Wasm,
    readonly address: number,
    readonly bytes: number,
  ) {}

  free(): void {
    this.wasm.free(this.address);
  }
}

export class Wasm {
  threads = 1;
  private model = 0;
  private stopped = "";

  /** text: the programs as JSON */
  private constructor(
    readonly text: string,
    readonly programs: Program[],
    private readonly module: WebAssembly.Module,
    private readonly exports: Exports,
    private readonly memory: WebAssembly.Memory,
  ) {}

  /** Download a module and its weights, verify both, and open the model. Throws ModelError. */
  static async open({ module, weights, threads }: WasmSource, progress: Progress, start: StartThread): Promise<Wasm> {
    checkSupport();
    const total = module.bytes + weights.bytes;
    const most = globalThis.crossOriginIsolated ? Math.min(threads ?? MOST_THREADS, navigator.hardwareConcurrency) : 1;
    const [text, alone, shared, hashes] = await download(module, (done, _, from) => progress(done, total, from), async (stream) => {
      const hashes = await readHashes(stream, weights.bytes);
      const text = decode(await stream.take((await member(stream, "programs.json")).bytes));
      const alone = await stream.take((await member(stream, "model.wasm")).bytes);
      const shared = await stream.take((await member(stream, "threads.wasm")).bytes);
      await stream.finish(module.digest);
      return [text, alone, shared, hashes] as const;
    });
    const memory = most > 1 ? sharedMemory() : null;
    const wasm = await Wasm.compiled(text, memory ? shared : alone, memory);
    if (memory) await wasm.startThreads(most, memory, start);
    const held = wasm.alloc(weights.bytes, "the weights");
    await downloadAs(ByteStream, weights, (done, _, from) => progress(module.bytes + done, total, from), async (stream) => {
      const right: Promise<boolean>[] = [];
      for (let at = 0; at < weights.bytes; at += PIECE) {
        const piece = await stream.take(Math.min(PIECE, weights.bytes - at));
        wasm.write(held.address + at, piece);
        right.push(fits(piece, hashes[at / PIECE]));
      }
      if ((await Promise.all(right)).includes(false)) throw altered();
    });
    wasm.create(held);
    return wasm;
  }

  /** Compile and start a verified module. shared: the memory of the form for threads */
  private static async compiled(text: string, code: Uint8Array<ArrayBuffer>, shared: WebAssembly.Memory | null): Promise<Wasm> {
    try {
      const module = await WebAssembly.compile(code);
      const exports = await instantiate(module, shared);
      exports._initialize();
      return new Wasm(text, readPrograms(text), module, exports, shared ?? (exports.memory as WebAssembly.Memory));
    } catch (error) {
      if (error instanceof ModelError) throw error;
      throw new ModelError(`This browser refuses the model's WebAssembly: ${(error as Error).message.slice(0, 600)}`);
    }
  }

  /** Start threads in addition to this one, as many as can be started. */
  private async startThreads(most: number, memory: WebAssembly.Memory, start: StartThread): Promise<void> {
    try {
      for (let number = 1; number < most; number++) {
        const stack = this.alloc(STACK, "the stack of a thread").address + STACK;
        await start({ module: this.module, memory, stack, number });
        this.exports.threads_team?.(++this.threads);
      }
    } catch {
      return; // fewer threads compute the same
    }
  }

  /** Open the model; its weights are packed as its kernels read them. */
  private create(weights: WasmMemory): void {
    const place = this.alloc(32, "a model").address;
    const numbers = new Uint32Array(this.memory.buffer, place, 5);
    numbers.set([0, 0, weights.address, weights.bytes, 1]); // a pointer to the model, and its options
    const failed = this.call(() => this.exports.model_create(place, place + 4));
    this.model = new Uint32Array(this.memory.buffer, place, 1)[0];
    this.free(place);
    if (failed) throw this.error();
  }

  /** Allocate memory. Throws where the module's memory cannot grow by that much. */
  alloc(bytes: number, what: string): WasmMemory {
    const whole = Math.max(Math.ceil(bytes / ALIGNMENT), 1) * ALIGNMENT;
    const address = whole < 2 ** 32 ? this.call(() => this.exports.aligned_alloc(ALIGNMENT, whole)) >>> 0 : 0;
    if (address) return new WasmMemory(this, address, bytes);
    throw new ModelError(
      `WebAssembly has too little memory left for ${what} (${size(bytes)}; it holds ${size(this.memory.buffer.byteLength)}); ` +
        "close other tabs, or use a shorter input or a smaller model.",
    );
  }

  free(address: number): void {
    this.call(() => this.exports.free(address));
  }

  write(address: number, data: ArrayBufferView): void {
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    new Uint8Array(this.memory.buffer, address, bytes.length).set(bytes);
  }

  /** Return a copy of bytes of the module's memory. */
  read(address: number, bytes: number): ArrayBuffer {
    return new Uint8Array(this.memory.buffer, address, bytes).slice().buffer;
  }

  /** Make room for a call with these values of the symbols, which `symbols` points to. */
  reserve(number: number, symbols: number): void {
    if (this.call(() => this.exports.model_reserve(this.model, number, symbols))) throw this.error();
  }

  /** Call a function. symbols, inputs, outputs: addresses of its numbers and of the addresses of its arrays */
  run(number: number, symbols: number, inputs: number, outputs: number): void {
    if (this.call(() => this.exports.model_run(this.model, number, symbols, inputs, outputs))) throw this.error();
  }

  private error(): ModelError {
    const memory = new Uint8Array(this.memory.buffer);
    const start = this.call(() => this.exports.model_error(this.model)) >>> 0;
    return new ModelError(`${decode(memory.slice(start, memory.indexOf(0, start)))}.`);
  }

  /** Run the module's code. After a trap it runs no more, since its memory may be in any state. */
  private call<T>(work: () => T): T {
    if (this.stopped) throw new ModelError(`The model's WebAssembly was stopped (${this.stopped}). Load the page again.`);
    try {
      return work();
    } catch (error) {
      this.stopped = (error as Error).message;
      throw new ModelError(`The model's WebAssembly was stopped (${this.stopped}). Load the page again, and give shorter inputs.`);
    }
  }
}

/** Throw where the browser runs no WebAssembly, or none with SIMD. */
function checkSupport(): void {
  if (typeof WebAssembly !== "object") {
    throw new ModelError("This browser runs no WebAssembly: it is old, or a lockdown mode forbids it. Use another, or allow it.");
  }
  if (!globalThis.crypto?.subtle) {
    throw new ModelError("This browser verifies no downloads here; open the page from localhost or over https.");
  }
  if (!WebAssembly.validate(new Uint8Array(SIMD))) {
    throw new ModelError("This browser's WebAssembly has no SIMD. Use Chrome or Edge from 91, Firefox from 89 or Safari from 16.4.");
  }
}

/** Read the module's manifest; return the hashes of the pieces of the weights. */
async function readHashes(stream: HashedStream, bytes: number): Promise<string[]> {
  const head = await member(stream, "manifest.json");
  const { format, schema, extra } = JSON.parse(decode(await stream.take(head.bytes))) as Manifest;
  if (format !== MODULE_FORMAT || schema !== SCHEMA) {
    throw damaged(`expected a ${MODULE_FORMAT} of schema ${SCHEMA}, got ${String(format).slice(0, 80)} of ${schema}`);
  }
  const { sha256, piece_bytes } = extra.weights as { sha256: string[]; piece_bytes: number };
  if (piece_bytes !== PIECE || sha256.length !== Math.ceil(bytes / PIECE)) throw damaged("its weights have another size");
  return sha256;
}

/** Return whether bytes have a hash. The browser computes it outside the page's thread. */
async function fits(bytes: Uint8Array<ArrayBuffer>, sha256: string): Promise<boolean> {
  return hexadecimal(new Uint8Array(await crypto.subtle.digest("SHA-256", bytes))) === sha256;
}

/** Return memory that threads share; null where the browser grants none so large. */
function sharedMemory(): WebAssembly.Memory | null {
  try {
    return new WebAssembly.Memory(MEMORY);
  } catch {
    return null;
  }
}

/** Make a module ready. It may call nothing of the system: files and clocks answer that there are none. */
async function instantiate(module: WebAssembly.Module, memory: WebAssembly.Memory | null): Promise<Exports> {
  const imports: WebAssembly.Imports = {};
  for (const { module: from, name, kind } of WebAssembly.Module.imports(module)) {
    imports[from] = { ...imports[from], [name]: kind === "memory" && memory ? memory : () => NO_FILE };
  }
  return (await WebAssembly.instantiate(module, imports)).exports as unknown as Exports;
}

/** Be a thread of a module until the worker ends. ready: called before the first wait */
export async function serveThread({ module, memory, stack, number }: ThreadStart, ready: () => void): Promise<void> {
  const exports = await instantiate(module, memory);
  (exports.__stack_pointer as WebAssembly.Global).value = stack;
  ready();
  try {
    exports.threads_serve?.(number);
  } catch {
    exports.threads_fail?.(); // the first thread waits for this one: let it fail with a message
  }
}
