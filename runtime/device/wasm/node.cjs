// Runs kernels of WebAssembly for runtime/device/wasm/device.py. Frames of a length and a message arrive on the standard input, and are
// answered in order. Launches and `mark` have no answer; the answer of `sync` covers all earlier ones.

const { readSync, writeSync } = require("node:fs");

const NO_FILE = 8; // EBADF of WASI
const functions = [];
const lists = [];
let allocator = null;
let failure = "";
let begun = 0n;

const ahead = Buffer.allocUnsafe(1 << 16);
let [from, to] = [0, 0]; // the filled part of `ahead`

function read(bytes) {
  const data = Buffer.allocUnsafe(bytes);
  for (let at = 0; at < bytes; ) {
    if (from === to) {
      [from, to] = [0, readSync(0, ahead, 0, ahead.length, null)];
      if (!to) process.exit(0); // the device was closed
    }
    const count = Math.min(bytes - at, to - from);
    ahead.copy(data, at, from, from + count);
    [at, from] = [at + count, from + count];
  }
  return data;
}

function write(data) {
  for (let at = 0; at < data.length; ) at += writeSync(1, data, at, data.length - at);
}

function answer(value) {
  const text = Buffer.from(JSON.stringify(value));
  const head = Buffer.alloc(4);
  head.writeUInt32LE(text.length);
  write(Buffer.concat([head, text]));
}

function load(code, memory) {
  const module = new WebAssembly.Module(code);
  const imports = {};
  for (const { module: from, name, kind } of WebAssembly.Module.imports(module)) {
    imports[from] = { ...imports[from], [name]: kind === "memory" ? memory : () => NO_FILE };
  }
  return new WebAssembly.Instance(module, imports).exports;
}

function launch(text) {
  const [number, addresses, scalars] = text;
  const list = [functions[number], [...addresses, ...scalars.map(BigInt)]];
  return () => list[0](...list[1]);
}

const calls = {
  start(_, code) {
    allocator = load(code);
    allocator._initialize();
    return process.versions.v8;
  },
  load({ names }, code) {
    const found = load(code, allocator.memory);
    found.__wasm_call_ctors?.();
    for (const name of names) functions.push(found[name]);
    return { first: functions.length - names.length, end: found.__heap_base.value };
  },
  alloc: ({ alignment, bytes }) => allocator.aligned_alloc(alignment, bytes) >>> 0,
  free: ({ address }) => void allocator.free(address),
  write: ({ address }, data) => void Buffer.from(allocator.memory.buffer).set(data, address),
  copy: ({ target, source, bytes }) => void Buffer.from(allocator.memory.buffer).copyWithin(target, source, source + bytes),
  bind: ({ launches, times }) => {
    const made = launches.map(launch);
    lists.push(() => {
      for (let k = 0; k < times; k++) for (const run of made) run();
    });
    return lists.length - 1;
  },
  since: () => Number(process.hrtime.bigint() - begun),
  drop: ({ list }) => void (lists[list] = null),
};

for (;;) {
  const head = read(8);
  const message = JSON.parse(read(head.readUInt32LE(0)).toString());
  const data = read(head.readUInt32LE(4));
  const { call } = message;
  try {
    if (call === "run") lists[message.list]();
    else if (call === "mark") begun = process.hrtime.bigint();
    else if (call === "sync") {
      answer(failure ? { error: failure } : { value: null });
      failure = "";
    } else if (call === "read") {
      answer({ value: null });
      write(Buffer.from(allocator.memory.buffer, message.address, message.bytes));
    } else answer({ value: calls[call](message, data) });
  } catch (error) {
    const said = `${error.name}: ${error.message}`;
    if (call === "run") failure ||= said;
    else answer({ error: said });
  }
}
