/** An artifact in the browser, ready to run. */

import { readArtifact } from "./artifact.js";
import type { Progress, Source } from "./download.js";
import { ModelError, inWords } from "./errors.js";
import { Executor } from "./executor.js";
import { Gpu } from "./gpu.js";
import type { Argument, ProgramExecutor } from "./program_executor.js";
import { DeviceTensor, type Tensor } from "./tensor.js";
import type { WasmSource } from "./wasm.js";
import { WasmEngine } from "./wasm_engine.js";

/** An artifact for WebGPU, its form for WebAssembly, or both. The second is used where the first cannot be. */
export type ModelSource = (Source & { wasm?: WasmSource }) | { wasm: WasmSource };

export class Model {
  private turn: Promise<unknown> = Promise.resolve();

  /**
   * device: what runs the model
   * without: why WebGPU is not used although the model has a form for it, or nothing
   */
  private constructor(
    readonly device: Gpu | WasmEngine,
    private readonly executors: ReadonlyMap<string, ProgramExecutor>,
    readonly without = "",
  ) {}

  /**
   * Download an artifact, verify it and compile its kernels. Throws ModelError.
   *
   * downloaded: called as bytes arrive; compiled: as kernels are compiled, with their number so far and in all
   */
  static async load(source: ModelSource, downloaded: Progress, compiled: (done: number, total: number) => void): Promise<Model> {
    if (!("url" in source)) return Model.onWasm(source.wasm, downloaded);
    let gpu: Gpu;
    try {
      gpu = await Gpu.open();
    } catch (error) {
      if (!source.wasm) throw error;
      return Model.onWasm(source.wasm, downloaded, inWords(error));
    }
    const { programs, constants } = await readArtifact(source, gpu, downloaded);
    const executors = programs.map((program) => new Executor(program, gpu));
    const total = programs.reduce((sum, program) => sum + program.kernels.length, 0);
    let done = 0;
    for (const executor of executors) await executor.prepare(constants, () => compiled(++done, total));
    return new Model(gpu, byName(executors));
  }

  private static async onWasm(source: WasmSource, downloaded: Progress, without = ""): Promise<Model> {
    const engine = await WasmEngine.open(source, downloaded);
    return new Model(engine, byName(engine.executors()), without);
  }

  /** The WebGPU device, where it runs the model. */
  get gpu(): Gpu | null {
    return this.device instanceof Gpu ? this.device : null;
  }

  get functions(): string[] {
    return [...this.executors.keys()];
  }

  executor(name: string): ProgramExecutor {
    const found = this.executors.get(name);
    if (!found) throw new ModelError(`Expected one of the functions ${this.functions.join(", ")}, got ${name}.`);
    return found;
  }

  /** Call a function; calls take turns. Results are in the page's memory, in order. */
  async run(name: string, inputs: Readonly<Record<string, Tensor>>): Promise<Tensor[]> {
    return (await this.inTurn(() => this.executor(name).run(inputs))) as Tensor[];
  }

  /** Call a function and keep the results of these numbers on the device. takes: arguments whose memory results may take */
  async runKept(
    name: string,
    inputs: Readonly<Record<string, Argument>>,
    results: readonly number[],
    takes: readonly string[] = [],
  ): Promise<Argument[]> {
    const keeping = { results: new Set(results), takes: new Set(takes) };
    return this.inTurn(() => this.executor(name).run(inputs, keeping));
  }

  private inTurn<T>(call: () => Promise<T>): Promise<T> {
    const result = this.turn.then(call);
    this.turn = result.catch(() => undefined);
    return result;
  }

  close(): void {
    this.device.close();
  }
}

/** Calls of one function whose state stays on the device: results replace arguments, such as a decoder's caches. */
export class Session {
  /**
   * state: arguments of the first call, such as the caches that `prefill` gives, which the first call stores as this function wants them
   * kept: the number of the result that replaces each argument of `state`
   */
  constructor(
    private readonly model: Model,
    private readonly name: string,
    private state: Record<string, Argument>,
    private readonly kept: Readonly<Record<string, number>>,
  ) {}

  /** Call the function with its other arguments; return its other results. After an error the state is as before. */
  async run(inputs: Readonly<Record<string, Tensor>>): Promise<Tensor[]> {
    const numbers = Object.values(this.kept);
    const found = await this.model.runKept(this.name, { ...inputs, ...this.state }, numbers, Object.keys(this.kept));
    for (const [name, number] of Object.entries(this.kept)) {
      const [before, made] = [this.state[name], found[number] as DeviceTensor];
      if (before instanceof DeviceTensor && before.memory !== made.memory) before.free();
      this.state[name] = made;
    }
    return found.filter((_, number) => !numbers.includes(number)) as Tensor[];
  }

  close(): void {
    for (const tensor of Object.values(this.state)) if (tensor instanceof DeviceTensor) tensor.free();
    this.state = {};
  }
}

function byName(executors: readonly ProgramExecutor[]): ReadonlyMap<string, ProgramExecutor> {
  return new Map(executors.map((executor) => [executor.program.name, executor]));
}
