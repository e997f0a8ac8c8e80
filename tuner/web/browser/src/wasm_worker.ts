/** The worker in which a model runs on WebAssembly, and the workers that are its threads: `wasm_engine.ts` says what it is asked. */

import { inWords } from "./errors.js";
import type { Argument, ProgramExecutor } from "./program_executor.js";
import { DeviceTensor, type Memory } from "./tensor.js";
import { type ThreadStart, Wasm, serveThread } from "./wasm.js";
import type { Answer, Given, Request } from "./wasm_engine.js";
import { WasmExecutor } from "./wasm_executor.js";

const page = globalThis as unknown as {
  postMessage(message: Answer | "ready", transfer?: Transferable[]): void;
  onmessage: (event: MessageEvent<Request | { thread: ThreadStart }>) => void;
};

let executors: ProgramExecutor[] = [];
const held = new Map<number, Memory>(); // results that stay, by their number in the page
let last = 0;

/** Start a thread in a separate worker. */
function start(thread: ThreadStart): Promise<void> {
  return new Promise((done, fail) => {
    const worker = new Worker(new URL("./wasm_worker.js", import.meta.url), { type: "module" });
    worker.onmessage = () => done();
    worker.onerror = (event) => fail(event);
    worker.postMessage({ thread });
  });
}

function given(argument: Given): Argument {
  if (!("handle" in argument)) return argument;
  const { dtype, shape, outer, handle } = argument;
  return new DeviceTensor(dtype, shape, outer, held.get(handle) as Memory);
}

/** Return a result as the page gets it. Memory that a call took keeps its number. */
function answered(result: Argument): Given {
  if (!(result instanceof DeviceTensor)) return result;
  const { dtype, shape, outer, memory } = result;
  const known = [...held].find(([, found]) => found === memory);
  const handle = known ? known[0] : ++last;
  held.set(handle, memory);
  return { dtype, shape, outer, handle, bytes: memory.bytes };
}

async function answer(request: Request): Promise<Answer> {
  const { id } = request;
  if (request.what === "open") {
    const wasm = await Wasm.open(request.source, (...progress) => page.postMessage({ id, progress }), start);
    executors = wasm.programs.map((program, number) => new WasmExecutor(program, wasm, number));
    return { id, opened: { text: wasm.text, threads: wasm.threads } };
  }
  if (request.what === "free") {
    held.get(request.handle)?.free();
    held.delete(request.handle);
    return { id, results: [] };
  }
  const inputs = Object.fromEntries(Object.entries(request.inputs).map(([name, argument]) => [name, given(argument)]));
  const keeping = { results: new Set(request.results), takes: new Set(request.takes) };
  const found = await executors[request.program].run(inputs, keeping);
  return { id, results: found.map(answered) };
}

page.onmessage = async ({ data }) => {
  if ("thread" in data) {
    await serveThread(data.thread, () => page.postMessage("ready"));
    return;
  }
  try {
    const found = await answer(data);
    const arrays = "results" in found ? found.results.filter((result) => "data" in result) : [];
    page.postMessage(found, arrays.map((result) => ("data" in result ? result.data.buffer : result) as ArrayBuffer));
  } catch (error) {
    page.postMessage({ id: data.id, error: inWords(error) });
  }
};
