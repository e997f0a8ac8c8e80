/** The page's side of a model that runs on WebAssembly in a worker, so that the page draws and reacts during calls. */

import type { Progress } from "./download.js";
import { ModelError } from "./errors.js";
import { type Program, readPrograms } from "./program.js";
import { type Argument, type Keeping, NOTHING, ProgramExecutor } from "./program_executor.js";
import { DeviceTensor, type Memory, type Tensor } from "./tensor.js";
import type { WasmSource } from "./wasm.js";

/** An array that the worker holds. handle: its number there; bytes: size of its memory */
interface Held {
  dtype: string;
  shape: number[];
  outer: number;
  handle: number;
  bytes: number;
}

export type Given = Tensor | Held;

export type Request = { id: number } & (
  | { what: "open"; source: WasmSource }
  | { what: "free"; handle: number }
  | { what: "run"; program: number; inputs: Record<string, Given>; results: number[]; takes: string[] }
);

export type Answer = { id: number } & (
  | { progress: Parameters<Progress> }
  | { opened: { text: string; threads: number } }
  | { results: Given[] }
  | { error: string }
);

type Ask = Request extends infer R ? (R extends { id: number } ? Omit<R, "id"> : never) : never;

interface Waiting {
  done: (answer: Answer) => void;
  fail: (error: ModelError) => void;
  progress?: Progress;
}

/** Memory of the module, which the worker holds. */
class RemoteMemory implements Memory {
  constructor(
    private readonly engine: WasmEngine,
    readonly handle: number,
    readonly bytes: number,
  ) {}

  free(): void {
    this.engine.forget(this.handle);
  }
}

export class WasmEngine {
  programs: Program[] = [];
  private threads = 1;
  private last = 0;
  private ended = "";
  private readonly waiting = new Map<number, Waiting>();
  private readonly memories = new Map<number, RemoteMemory>();
  private readonly worker = new Worker(new URL("./wasm_worker.js", import.meta.url), { type: "module" });

  private constructor() {
    this.worker.onmessage = ({ data }: MessageEvent<Answer>) => this.take(data);
    this.worker.onerror = (event) => {
      event.preventDefault();
      this.end(`the browser stopped it: ${event.message || "no reason given"}`);
    };
  }

  /** Open a model in a worker. Throws ModelError. */
  static async open(source: WasmSource, progress: Progress): Promise<WasmEngine> {
    const engine = new WasmEngine();
    const here = (url: string): string => new URL(url, globalThis.document?.baseURI).href;
    const { module, weights } = source;
    const absolute = { ...source, module: { ...module, url: here(module.url) }, weights: { ...weights, url: here(weights.url) } };
    try {
      const found = await engine.ask({ what: "open", source: absolute }, progress);
      if ("opened" in found) {
        engine.programs = readPrograms(found.opened.text);
        engine.threads = found.opened.threads;
      }
      return engine;
    } catch (error) {
      engine.close();
      throw error;
    }
  }

  get name(): string {
    return this.threads > 1 ? `WebAssembly, ${this.threads} threads` : "WebAssembly";
  }

  executors(): ProgramExecutor[] {
    return this.programs.map((program, number) => new RemoteExecutor(program, this, number));
  }

  /** Call the function of this number; results that stay on the device stay in the worker. */
  async run(program: number, inputs: Readonly<Record<string, Argument>>, { results, takes }: Keeping): Promise<Argument[]> {
    const given = Object.fromEntries(Object.entries(inputs).map(([name, argument]) => [name, sent(argument)]));
    const found = await this.ask({ what: "run", program, inputs: given, results: [...results], takes: [...takes] });
    return "results" in found ? found.results.map((result) => this.received(result)) : [];
  }

  /** Give memory back. */
  forget(handle: number): void {
    if (this.memories.delete(handle) && !this.ended) void this.ask({ what: "free", handle }).catch(() => undefined);
  }

  close(): void {
    this.end("the page closed it");
    this.worker.terminate(); // and its threads with it
  }

  private received(result: Given): Argument {
    if (!("handle" in result)) return result;
    const { dtype, shape, outer, handle, bytes } = result;
    const memory = this.memories.get(handle) ?? new RemoteMemory(this, handle, bytes);
    this.memories.set(handle, memory);
    return new DeviceTensor(dtype, shape, outer, memory);
  }

  private ask(request: Ask, progress?: Progress): Promise<Answer> {
    return new Promise((done, fail) => {
      if (this.ended) throw new ModelError(`The model's WebAssembly was stopped (${this.ended}). Load the page again.`);
      const id = ++this.last;
      this.waiting.set(id, { done, fail, progress });
      this.worker.postMessage({ ...request, id });
    });
  }

  private take(answer: Answer): void {
    const asked = this.waiting.get(answer.id);
    if ("progress" in answer) {
      asked?.progress?.(...answer.progress);
      return;
    }
    this.waiting.delete(answer.id);
    if ("error" in answer) asked?.fail(new ModelError(answer.error));
    else asked?.done(answer);
  }

  private end(why: string): void {
    this.ended ||= why;
    for (const { fail } of this.waiting.values()) {
      fail(new ModelError(`The model's WebAssembly was stopped (${this.ended}). Load the page again, and give shorter inputs.`));
    }
    this.waiting.clear();
  }
}

/** A program that the worker runs. */
class RemoteExecutor extends ProgramExecutor {
  constructor(
    program: Program,
    private readonly engine: WasmEngine,
    private readonly number: number,
  ) {
    super(program);
  }

  override run(inputs: Readonly<Record<string, Argument>>, keeping: Keeping = NOTHING): Promise<Argument[]> {
    return this.engine.run(this.number, inputs, keeping);
  }
}

function sent(argument: Argument): Given {
  if (!(argument instanceof DeviceTensor)) return argument;
  const { dtype, shape, outer, memory } = argument;
  return { dtype, shape, outer, handle: (memory as RemoteMemory).handle, bytes: memory.bytes };
}
