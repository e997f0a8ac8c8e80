/** A program on the device: binds its symbols, decides its plans, allocates, launches; see runtime/executor.py. */

import { checkComputed, checkInputs, checkValues, matchSymbols } from "./arguments.js";
import { ModelError } from "./errors.js";
import type { Compiled, Gpu, Launch } from "./gpu.js";
import { type Program, type Step, formatMessage } from "./program.js";
import { ScalarList } from "./scalars.js";
import { type Data, DeviceTensor, type Memory, type Tensor, count, dataClass, itemBytes, moveDim } from "./tensor.js";

const MOST_BINDINGS = 64;
const ALIGNMENT = 256;
const LEAST32 = -(2n ** 31n);
const MOST32 = 2n ** 31n - 1n;

export type Argument = Tensor | DeviceTensor;

/** A program with its symbols bound. launches: valid for one generation of the memory */
interface Bound {
  values: bigint[];
  shapes: number[][];
  steps: Step[];
  choices: { call: string; label: string }[];
  scalars: GPUBuffer | null;
  launches: Launch[];
  generation: number;
}

/** What a call keeps on the device. results: their numbers; takes: arguments whose memory results may take */
export interface Keeping {
  results: ReadonlySet<number>;
  takes: ReadonlySet<string>;
}

const NOTHING: Keeping = { results: new Set(), takes: new Set() };

export class Executor {
  readonly scalars: ScalarList;
  private readonly kernels = new Map<string, Compiled>();
  private readonly bindings = new Map<string, Bound>();
  private readonly storages: (Memory | null)[];
  private readonly own = new Map<number, Memory>();
  private readonly fixed = new Map<number, Memory>();
  private replaced = new Map<number, Memory>();
  private readonly views = new Map<number, number[]>();
  private generation = 0;

  constructor(
    readonly program: Program,
    private readonly gpu: Gpu,
  ) {
    this.scalars = new ScalarList(program.scalars);
    this.storages = program.storages.map(() => null);
    program.buffers.forEach(({ base }, index) => {
      if (base !== null) this.views.set(base, [...(this.views.get(base) ?? []), index]);
    });
  }

  /** Compile the kernels, place the constants and pack weights. */
  async prepare(constants: ReadonlyMap<string, Memory>, done: () => void): Promise<void> {
    const { program, gpu } = this;
    for (const [name, kernel] of await gpu.compile(program.kernels, done)) this.kernels.set(name, kernel);
    const fixed = this.scalars.fixed(program.symbols.length);
    const sized = (slot: number): number => {
      if (fixed[slot] === null) throw new ModelError(`${program.name}: a packed weight's size depends on a symbol; build it again.`);
      return Number(fixed[slot]);
    };
    for (const [index, spec] of program.buffers.entries()) {
      const bytes = () => count(spec.shape.map(sized)) * itemBytes(spec.dtype);
      if (spec.role === "const") {
        const memory = constants.get(spec.name) as Memory;
        if (memory.bytes < bytes()) throw new ModelError(`${program.name}: constant ${spec.name} is too small; build it again.`);
        this.fixed.set(index, memory);
      } else if (spec.role === "packed") this.fixed.set(index, await gpu.alloc(bytes(), `the packed weight ${spec.name}`));
    }
    if (!program.prepare.length) return;
    const values = fixed.map((value) => value ?? 0n);
    const encoder = gpu.device.createCommandEncoder();
    const { launches } = this.launches(program.prepare, values);
    gpu.encode(encoder, launches);
    gpu.device.queue.submit([encoder.finish()]);
    await gpu.guard("packing weights", () => gpu.device.queue.onSubmittedWorkDone());
  }

  /** Call the program. Results are in the page's memory, or on the device where they are to be kept. Throws in words. */
  async run(inputs: Readonly<Record<string, Argument>>, keeping: Keeping = NOTHING): Promise<Argument[]> {
    const { program, gpu } = this;
    gpu.check(`a call of ${program.name}`);
    const given = checkInputs(program, inputs);
    const key = matchSymbols(program, this.scalars, given);
    const bound = this.bound(key);
    checkValues(program, given, bound.values);
    this.replaced = new Map();
    try {
      return await this.call(bound, given, keeping);
    } finally {
      this.replaced = new Map();
    }
  }

  /** Return the variant of every call for these symbol values. */
  choices(symbols: readonly number[]): { call: string; label: string }[] {
    return this.bound(symbols.map(BigInt)).choices;
  }

  /** The least and the greatest value of an input's dim; Infinity where it is unbounded. */
  bounds(name: string, dim: number): [number, number] {
    const spec = this.program.buffers.find((buffer) => buffer.role === "input" && buffer.name === name);
    const slot = spec?.shape[dim];
    if (slot === undefined) throw new ModelError(`${this.program.name}: wanted an input ${name} with a dim ${dim}, found none.`);
    const symbol = this.scalars.symbol(slot);
    if (symbol < 0) {
      const value = this.scalars.fixed(this.program.symbols.length)[slot];
      return value === null ? [0, Infinity] : [Number(value), Number(value)];
    }
    const { lower, upper } = this.program.symbols[symbol];
    return [Number(lower), upper === null ? Infinity : Number(upper)];
  }

  /** The most past positions that a decoder takes: the bound of the symbol that its caches have and its token ids do not. */
  positions(): number {
    const { inputs, buffers } = this.program;
    const [ids, ...caches] = inputs.map((index) => buffers[index]);
    for (const { name, shape } of caches) {
      const dim = shape.findIndex((slot) => !ids.shape.includes(slot) && this.scalars.symbol(slot) >= 0);
      if (dim >= 0) return this.bounds(name, dim)[1];
    }
    return Infinity;
  }

  private bound(symbols: readonly bigint[]): Bound {
    const key = symbols.join();
    const known = this.bindings.get(key);
    if (known) {
      this.bindings.delete(key); // the last one used is the last one dropped
      this.bindings.set(key, known);
      return known;
    }
    const { program } = this;
    const values = this.scalars.evaluate(symbols);
    for (const { slot, message, values: shown } of program.checks) {
      if (values[slot] === 0n) {
        throw new ModelError(`${program.name}: ${formatMessage(message, shown.map((at) => values[at]))}`);
      }
    }
    const shapes = program.buffers.map(({ shape }) => shape.map((slot) => Number(values[slot])));
    const steps: Step[] = [];
    const choices: { call: string; label: string }[] = [];
    for (const { name, choice, variants } of program.calls) {
      const variant = variants[Number(values[choice])];
      if (!variant) throw new ModelError(`${program.name}: call ${name} has no variant ${values[choice]}; build it again.`);
      steps.push(...variant.steps);
      choices.push({ call: name, label: variant.label });
    }
    const bound = { values, shapes, steps, choices, scalars: null, launches: [], generation: -1 };
    this.bindings.set(key, bound);
    if (this.bindings.size > MOST_BINDINGS) {
      const [oldest, dropped] = this.bindings.entries().next().value as [string, Bound];
      dropped.scalars?.destroy();
      this.bindings.delete(oldest);
    }
    return bound;
  }

  private async call(bound: Bound, given: ReadonlyMap<number, Argument>, keeping: Keeping): Promise<Argument[]> {
    const { program, gpu } = this;
    const encoder = gpu.device.createCommandEncoder();
    const kept = await this.keep(bound, given, keeping, encoder);
    await this.grow(bound);
    for (const [index, argument] of given) {
      if (argument instanceof DeviceTensor) continue;
      const memory = this.memory(index);
      gpu.write(memory, moveDim(argument, program.buffers[index].outer, 0).data);
    }
    const moved = this.replaced.size > 0;
    if (moved || bound.generation !== this.generation) {
      bound.scalars?.destroy();
      const { launches, scalars } = this.launches(bound.steps, bound.values);
      Object.assign(bound, { launches, scalars, generation: moved ? -1 : this.generation });
    }
    gpu.encode(encoder, bound.launches);
    return this.results(bound, kept, encoder);
  }

  /** Let launches read arguments and write kept results where they are. Returns the kept results by number. */
  private async keep(
    bound: Bound,
    given: ReadonlyMap<number, Argument>,
    keeping: Keeping,
    encoder: GPUCommandEncoder,
  ): Promise<Map<number, DeviceTensor>> {
    const { program, gpu } = this;
    for (const [index, argument] of given) {
      if (!(argument instanceof DeviceTensor)) continue;
      this.replaced.set(index, argument.memory);
      const { name } = program.buffers[index];
      if (!keeping.takes.has(name) && argument.memory.bytes < this.room(bound, index)) {
        throw new ModelError(`${program.name}: a result extends ${name} in place, so its memory must be given up to the call.`);
      }
    }
    const kept = new Map<number, DeviceTensor>();
    for (const [number, index] of program.outputs.entries()) {
      if (!keeping.results.has(number)) continue;
      const spec = program.buffers[index];
      const base = spec.role === "view" ? (spec.base as number) : index;
      const argument = given.get(base);
      let memory: Memory;
      if (spec.role === "output") {
        memory = await gpu.alloc(this.bytes(bound, index), `the result ${spec.name}`);
      } else if (argument instanceof DeviceTensor && keeping.takes.has(program.buffers[base].name)) {
        memory = argument.memory;
        if (memory.bytes < this.room(bound, base)) {
          // what grows once will grow again
          memory = await gpu.alloc(Math.max(2 * memory.bytes, this.room(bound, base)), `the result ${spec.name}`);
          const used = count(argument.shape) * itemBytes(argument.dtype);
          encoder.copyBufferToBuffer(argument.memory.buffer, 0, memory.buffer, 0, Math.ceil(used / 4) * 4);
        }
      } else if (argument && !(argument instanceof DeviceTensor)) {
        memory = await gpu.alloc(this.room(bound, base), `the result ${spec.name}`);
      } else {
        throw new ModelError(`${program.name}: the result ${spec.name} cannot be kept on the device.`);
      }
      this.replaced.set(base, memory);
      kept.set(number, new DeviceTensor(spec.dtype, bound.shapes[index], spec.outer, memory));
    }
    return kept;
  }

  private async results(bound: Bound, kept: ReadonlyMap<number, DeviceTensor>, encoder: GPUCommandEncoder): Promise<Argument[]> {
    const { program, gpu } = this;
    const read = program.outputs.map((index, number) => ({ index, number })).filter(({ number }) => !kept.has(number));
    const wanted = [...read.map(({ index }) => index), ...program.checked.map(({ buffer }) => buffer)];
    const found = await gpu.read(
      encoder,
      wanted.map((index) => ({ buffer: this.memory(index).buffer, bytes: this.bytes(bound, index) })),
    );
    const data = (at: number): Data => new (dataClass(program.buffers[wanted[at]].dtype))(found[at]);
    program.checked.forEach((checked, at) => {
      const place = read.length + at;
      checkComputed(program, checked, data(place), bound.shapes[wanted[place]], bound.values[checked.size]);
    });
    const results: Argument[] = [];
    for (const [number, tensor] of kept) results[number] = tensor;
    read.forEach(({ index, number }, at) => {
      const { dtype, outer } = program.buffers[index];
      const shape = bound.shapes[index];
      const stored = [...shape.slice(outer, outer + 1), ...shape.slice(0, outer), ...shape.slice(outer + 1)];
      results[number] = moveDim({ dtype, shape: stored, data: data(at) }, 0, outer);
    });
    return results;
  }

  private bytes(bound: Bound, index: number): number {
    return count(bound.shapes[index]) * itemBytes(this.program.buffers[index].dtype);
  }

  /** The bytes of an array's memory: a result may extend an input in place. */
  private room(bound: Bound, index: number): number {
    return Math.max(this.bytes(bound, index), ...(this.views.get(index) ?? []).map((view) => this.bytes(bound, view)));
  }

  /** Make memory as large as this binding needs. Larger memory is another, so bindings make their launches anew. */
  private async grow(bound: Bound): Promise<void> {
    const { program } = this;
    for (const [at, slot] of program.storages.entries()) {
      this.storages[at] = await this.slab(this.storages[at], Number(bound.values[slot]), "intermediate results");
    }
    for (const [index, spec] of program.buffers.entries()) {
      if ((spec.role !== "input" && spec.role !== "output") || this.replaced.has(index)) continue;
      this.own.set(index, await this.slab(this.own.get(index) ?? null, this.room(bound, index), `the array ${spec.name}`));
    }
  }

  private async slab(old: Memory | null, bytes: number, what: string): Promise<Memory> {
    if (old && old.bytes >= bytes) return old;
    const larger = await this.gpu.alloc(bytes, what);
    old?.buffer.destroy();
    this.generation++;
    return larger;
  }

  private memory(index: number): Memory {
    const { base, storage } = this.program.buffers[index];
    const found = this.replaced.get(index) ?? this.fixed.get(index);
    if (found) return found;
    if (base !== null) return this.memory(base);
    return (storage === null ? this.own.get(index) : this.storages[storage]) as Memory;
  }

  /** Make the launches of steps, and the buffer of their integers. */
  private launches(steps: readonly Step[], values: readonly bigint[]): { launches: Launch[]; scalars: GPUBuffer | null } {
    const { gpu } = this;
    const places: number[] = [];
    let bytes = 0;
    for (const { scalars } of steps) {
      places.push(bytes);
      bytes += Math.ceil((4 * scalars.length) / ALIGNMENT) * ALIGNMENT;
    }
    const numbers = new Int32Array(bytes / 4);
    steps.forEach(({ scalars, target }, at) => {
      scalars.forEach((slot, k) => {
        const value = values[slot];
        if (value < LEAST32 || value > MOST32) {
          throw new ModelError(`Kernel ${target} wants sizes and indices that 32 bits hold, found ${value}; use a smaller input.`);
        }
        numbers[places[at] / 4 + k] = Number(value);
      });
    });
    const usage = GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST;
    const buffer = bytes ? gpu.device.createBuffer({ size: bytes, usage }) : null;
    if (buffer) gpu.device.queue.writeBuffer(buffer, 0, numbers);
    const launches = steps.map(({ target, buffers, scalars, grid }, at) => {
      const place = buffer && scalars.length ? { buffer, offset: places[at], size: Math.ceil(scalars.length / 4) * 16 } : null;
      const kernel = this.kernels.get(target) as Compiled;
      const used = buffers.map((index) => this.memory(index).buffer);
      return gpu.launch(kernel, used, place, grid.map((slot) => Number(values[slot])));
    });
    return { launches: launches.filter((launch) => launch !== null), scalars: buffer };
  }
}
