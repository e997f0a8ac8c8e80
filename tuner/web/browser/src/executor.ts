/** A program on WebGPU: binds its symbols, decides its plans, allocates, launches; see runtime/executor.py. */

import { checkComputed, checkInputs, checkValues, matchSymbols } from "./arguments.js";
import { ModelError } from "./errors.js";
import type { Compiled, Gpu, Launch } from "./gpu.js";
import type { Program, Step } from "./program.js";
import { type Argument, type Binding, type Keeping, LastBindings, NOTHING, ProgramExecutor } from "./program_executor.js";
import { type Data, DeviceTensor, type GpuMemory, count, dataClass, itemBytes, moveDim } from "./tensor.js";

const ALIGNMENT = 256;
const LEAST32 = -(2n ** 31n);
const MOST32 = 2n ** 31n - 1n;

/** A program with its symbols bound. launches: valid for one generation of the memory */
interface Bound extends Binding {
  steps: Step[];
  scalars: GPUBuffer | null;
  launches: Launch[];
  generation: number;
}

export class Executor extends ProgramExecutor {
  private readonly kernels = new Map<string, Compiled>();
  private readonly bindings = new LastBindings<Bound>(({ scalars }) => scalars?.destroy());
  private readonly storages: (GpuMemory | null)[];
  private readonly own = new Map<number, GpuMemory>();
  private readonly fixed = new Map<number, GpuMemory>();
  private replaced = new Map<number, GpuMemory>();
  private generation = 0;

  constructor(
    program: Program,
    private readonly gpu: Gpu,
  ) {
    super(program);
    this.storages = program.storages.map(() => null);
  }

  /** Compile the kernels, place the constants and pack weights. */
  async prepare(constants: ReadonlyMap<string, GpuMemory>, done: () => void): Promise<void> {
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
        const memory = constants.get(spec.name) as GpuMemory;
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

  override async run(inputs: Readonly<Record<string, Argument>>, keeping: Keeping = NOTHING): Promise<Argument[]> {
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

  private bound(symbols: readonly bigint[]): Bound {
    return this.bindings.get(symbols, () => {
      const { program } = this;
      const binding = this.bind(symbols);
      const steps = program.calls.flatMap(({ name, choice, variants }) => {
        const number = binding.values[choice];
        const variant = variants[Number(number)];
        if (!variant) throw new ModelError(`${program.name}: call ${name} has no variant ${number}; build it again.`);
        return variant.steps;
      });
      return { ...binding, steps, scalars: null, launches: [], generation: -1 };
    });
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

  /** Let launches read arguments, and write the results that stay on the device, in place. Returns these results by number. */
  private async keep(
    bound: Bound,
    given: ReadonlyMap<number, Argument>,
    keeping: Keeping,
    encoder: GPUCommandEncoder,
  ): Promise<Map<number, DeviceTensor>> {
    const { program, gpu } = this;
    for (const [index, argument] of given) {
      if (!(argument instanceof DeviceTensor)) continue;
      this.replaced.set(index, argument.memory as GpuMemory);
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
      let memory: GpuMemory;
      if (spec.role === "output") {
        memory = await gpu.alloc(this.bytes(bound, index), `the result ${spec.name}`);
      } else if (argument instanceof DeviceTensor && keeping.takes.has(program.buffers[base].name)) {
        memory = argument.memory as GpuMemory;
        if (memory.bytes < this.room(bound, base)) {
          // what grows once will grow again
          memory = await gpu.alloc(Math.max(2 * memory.bytes, this.room(bound, base)), `the result ${spec.name}`);
          const used = count(argument.shape) * itemBytes(argument.dtype);
          encoder.copyBufferToBuffer((argument.memory as GpuMemory).buffer, 0, memory.buffer, 0, Math.ceil(used / 4) * 4);
        }
      } else if (argument && !(argument instanceof DeviceTensor)) {
        memory = await gpu.alloc(this.room(bound, base), `the result ${spec.name}`);
      } else {
        throw new ModelError(`${program.name}: the result ${spec.name} cannot stay on the device.`);
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

  /** Grow memory as this binding needs. Growing replaces the buffers, so bindings must make their launches again. */
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

  private async slab(old: GpuMemory | null, bytes: number, what: string): Promise<GpuMemory> {
    if (old && old.bytes >= bytes) return old;
    const larger = await this.gpu.alloc(bytes, what);
    old?.buffer.destroy();
    this.generation++;
    return larger;
  }

  private memory(index: number): GpuMemory {
    const { base, storage } = this.program.buffers[index];
    const found = this.replaced.get(index) ?? this.fixed.get(index);
    if (found) return found;
    if (base !== null) return this.memory(base);
    return (storage === null ? this.own.get(index) : this.storages[storage]) as GpuMemory;
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
          throw new ModelError(`Kernel ${target} needs sizes and indices of 32 bits, got ${value}; use a smaller input.`);
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
