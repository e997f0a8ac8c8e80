/** A program in a WebAssembly module: checks arguments, places them in the module's memory, calls. */

import { checkInputs, checkValues, matchSymbols } from "./arguments.js";
import type { Program } from "./program.js";
import { type Argument, type Binding, type Keeping, LastBindings, NOTHING, ProgramExecutor } from "./program_executor.js";
import { DeviceTensor, dataClass, moveDim } from "./tensor.js";
import type { Wasm, WasmMemory } from "./wasm.js";

export class WasmExecutor extends ProgramExecutor {
  private readonly bindings = new LastBindings<Binding>();
  private readonly own = new Map<number, WasmMemory>();
  private readonly numbers: WasmMemory;

  /** number: number of the function in the module */
  constructor(
    program: Program,
    private readonly wasm: Wasm,
    private readonly number: number,
  ) {
    super(program);
    const { symbols, inputs, outputs } = program;
    this.numbers = wasm.alloc(8 * symbols.length + 4 * (inputs.length + outputs.length), `the arguments of ${program.name}`);
  }

  override async run(inputs: Readonly<Record<string, Argument>>, keeping: Keeping = NOTHING): Promise<Argument[]> {
    const { program } = this;
    const given = checkInputs(program, inputs);
    const symbols = matchSymbols(program, this.scalars, given);
    const binding = this.bindings.get(symbols, () => this.bind(symbols));
    checkValues(program, given, binding.values);
    const fresh: WasmMemory[] = [];
    try {
      return this.call(binding, symbols, given, keeping, fresh);
    } catch (error) {
      for (const memory of fresh) memory.free();
      throw error;
    }
  }

  /** Call the module. fresh: gets the memory that is allocated for results that stay */
  private call(
    binding: Binding,
    symbols: readonly bigint[],
    given: ReadonlyMap<number, Argument>,
    keeping: Keeping,
    fresh: WasmMemory[],
  ): Argument[] {
    const { program, wasm } = this;
    const places = new Map<number, WasmMemory>();
    const kept = this.keep(binding, given, keeping, places, fresh);
    for (const [index, argument] of given) {
      if (argument instanceof DeviceTensor) places.set(index, argument.memory as WasmMemory);
      else if (!places.has(index)) places.set(index, this.slab(index, this.bytes(binding, index)));
    }
    const results = program.outputs.map((index, number) => kept[number] ?? this.slab(~number, this.bytes(binding, index)));
    for (const [index, argument] of given) {
      if (argument instanceof DeviceTensor) continue;
      wasm.write((places.get(index) as WasmMemory).address, moveDim(argument, program.buffers[index].outer, 0).data);
    }
    const { address } = this.numbers;
    const [atInputs, atOutputs] = [8 * symbols.length, 8 * symbols.length + 4 * program.inputs.length];
    wasm.write(address, new BigInt64Array(symbols));
    wasm.write(address + atInputs, new Uint32Array(program.inputs.map((index) => (places.get(index) as WasmMemory).address)));
    wasm.write(address + atOutputs, new Uint32Array(results.map((memory) => memory.address)));
    wasm.reserve(this.number, address);
    wasm.run(this.number, address, address + atInputs, address + atOutputs);
    return program.outputs.map((index, number) => {
      const { dtype, outer } = program.buffers[index];
      const shape = binding.shapes[index];
      if (kept[number]) return new DeviceTensor(dtype, shape, outer, kept[number]);
      const stored = [...shape.slice(outer, outer + 1), ...shape.slice(0, outer), ...shape.slice(outer + 1)];
      const data = new (dataClass(dtype))(wasm.read(results[number].address, this.bytes(binding, index)));
      return moveDim({ dtype, shape: stored, data }, 0, outer);
    });
  }

  /** Return the memory of results that stay, by number. A result that extends a donated argument is in its memory. */
  private keep(
    binding: Binding,
    given: ReadonlyMap<number, Argument>,
    keeping: Keeping,
    places: Map<number, WasmMemory>,
    fresh: WasmMemory[],
  ): WasmMemory[] {
    const { program, wasm } = this;
    const kept: WasmMemory[] = [];
    for (const [number, index] of program.outputs.entries()) {
      if (!keeping.results.has(number)) continue;
      const spec = program.buffers[index];
      const base = spec.base ?? index;
      const argument = given.get(base);
      const room = this.room(binding, base);
      if (argument instanceof DeviceTensor && keeping.takes.has(program.buffers[base].name) && argument.memory.bytes >= room) {
        kept[number] = argument.memory as WasmMemory;
        continue;
      }
      const more = argument instanceof DeviceTensor ? 2 * argument.memory.bytes : 0; // what grows once will grow again
      kept[number] = wasm.alloc(Math.max(room, more), `the result ${spec.name}`);
      fresh.push(kept[number]);
      if (argument && !(argument instanceof DeviceTensor)) places.set(base, kept[number]);
    }
    return kept;
  }

  /** Return memory that calls share: of an argument by its buffer, of a result by the complement of its number. */
  private slab(key: number, bytes: number): WasmMemory {
    const old = this.own.get(key);
    if (old && old.bytes >= bytes) return old;
    old?.free();
    this.own.delete(key);
    const { buffers, outputs } = this.program;
    const larger = this.wasm.alloc(bytes, `the array ${buffers[key < 0 ? outputs[~key] : key].name}`);
    this.own.set(key, larger);
    return larger;
  }
}
