/** What executors of a program share, on WebGPU and on WebAssembly. */

import { ModelError } from "./errors.js";
import { type Program, formatMessage } from "./program.js";
import { ScalarList } from "./scalars.js";
import { type DeviceTensor, type Tensor, count, itemBytes } from "./tensor.js";

const MOST_BINDINGS = 64;

export type Argument = Tensor | DeviceTensor;

/** What a call keeps on the device. results: their numbers; takes: arguments whose memory results may take */
export interface Keeping {
  results: ReadonlySet<number>;
  takes: ReadonlySet<string>;
}

export const NOTHING: Keeping = { results: new Set(), takes: new Set() };

/** A program's numbers for one value of each symbol. shapes: by buffer */
export interface Binding {
  values: bigint[];
  shapes: number[][];
}

/** The bindings that were used last. `drop` is called with the one that makes room for another. */
export class LastBindings<T extends Binding> {
  private readonly kept = new Map<string, T>();

  constructor(private readonly drop: (oldest: T) => void = () => undefined) {}

  /** Return the binding of these symbol values; `make` is called if none is cached. */
  get(symbols: readonly bigint[], make: () => T): T {
    const key = symbols.join();
    const found = this.kept.get(key) ?? make();
    this.kept.delete(key); // the last one used is the last one dropped
    this.kept.set(key, found);
    if (this.kept.size > MOST_BINDINGS) {
      const [oldest, dropped] = this.kept.entries().next().value as [string, T];
      this.drop(dropped);
      this.kept.delete(oldest);
    }
    return found;
  }
}

/** A program that can be called: on WebGPU an `Executor`, on WebAssembly a `WasmExecutor`. */
export abstract class ProgramExecutor {
  readonly scalars: ScalarList;
  private readonly views = new Map<number, number[]>();

  constructor(readonly program: Program) {
    this.scalars = new ScalarList(program.scalars);
    program.buffers.forEach(({ base }, index) => {
      if (base !== null) this.views.set(base, [...(this.views.get(base) ?? []), index]);
    });
  }

  /** Call the program. Results are in the page's memory, or on the device if they are to stay there. Throws ModelError. */
  abstract run(inputs: Readonly<Record<string, Argument>>, keeping?: Keeping): Promise<Argument[]>;

  /** Return the variant of every call for these symbol values. */
  choices(symbols: readonly number[]): { call: string; label: string }[] {
    const { values } = this.bind(symbols.map(BigInt));
    return this.program.calls.map(({ name, choice, variants }) => {
      const variant = variants[Number(values[choice])];
      if (!variant) throw new ModelError(`${this.program.name}: call ${name} has no variant ${values[choice]}; build it again.`);
      return { call: name, label: variant.label };
    });
  }

  /** The least and the greatest value of an input's dim; Infinity where it is unbounded. */
  bounds(name: string, dim: number): [number, number] {
    const spec = this.program.buffers.find((buffer) => buffer.role === "input" && buffer.name === name);
    const slot = spec?.shape[dim];
    if (slot === undefined) throw new ModelError(`${this.program.name}: expected an input ${name} with a dim ${dim}, got none.`);
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

  /** Evaluate the scalar list. Throws where a check of the program fails. */
  protected bind(symbols: readonly bigint[]): Binding {
    const { program } = this;
    const values = this.scalars.evaluate(symbols);
    for (const { slot, message, values: shown } of program.checks) {
      if (values[slot] === 0n) {
        throw new ModelError(`${program.name}: ${formatMessage(message, shown.map((at) => values[at]))}`);
      }
    }
    return { values, shapes: program.buffers.map(({ shape }) => shape.map((slot) => Number(values[slot]))) };
  }

  protected bytes({ shapes }: Binding, index: number): number {
    return count(shapes[index]) * itemBytes(this.program.buffers[index].dtype);
  }

  /** The bytes of an array's memory: a result may extend an input in place. */
  protected room(binding: Binding, index: number): number {
    return Math.max(this.bytes(binding, index), ...(this.views.get(index) ?? []).map((view) => this.bytes(binding, view)));
  }
}
