/** Checks of a call's arguments, with readable messages; see runtime/arguments.py. */

import { ModelError } from "./errors.js";
import type { Program } from "./program.js";
import type { Argument } from "./program_executor.js";
import type { ScalarList } from "./scalars.js";
import { type Data, DeviceTensor, checkTensor } from "./tensor.js";

/** Return the arguments by buffer. Throws for a missing or unknown one, another type or another number of dims. */
export function checkInputs(program: Program, inputs: Readonly<Record<string, Argument>>): Map<number, Argument> {
  const names = program.inputs.map((index) => program.buffers[index].name);
  const unknown = Object.keys(inputs).filter((name) => !names.includes(name));
  if (unknown.length) throw new ModelError(`${program.name}: expected the parameters ${names.join(", ")}, got ${unknown.join(", ")}.`);
  const given = new Map<number, Argument>();
  for (const index of program.inputs) {
    const { name, dtype, shape } = program.buffers[index];
    const argument = inputs[name];
    const where = `${program.name}: parameter ${name}`;
    if (!argument) throw new ModelError(`${where}: expected an array, got none.`);
    if (argument.dtype !== dtype || argument.shape.length !== shape.length) {
      throw new ModelError(
        `${where}: expected ${shape.length} dims of ${dtype}, got ${argument.shape.length} of ${argument.dtype}.`,
      );
    }
    if (!(argument instanceof DeviceTensor)) checkTensor(where, argument);
    else if (argument.outer !== program.buffers[index].outer) {
      throw new ModelError(`${where}: expected an array that is stored by dim ${program.buffers[index].outer}, got another.`);
    }
    given.set(index, argument);
  }
  return given;
}

/** Return the symbols' values, read off the dims of the arguments. Throws where dims or declared bounds do not fit. */
export function matchSymbols(program: Program, scalars: ScalarList, given: ReadonlyMap<number, Argument>): bigint[] {
  const values: bigint[] = [];
  const origin: string[] = [];
  for (const [index, { shape }] of given) {
    program.buffers[index].shape.forEach((slot, dim) => {
      const symbol = scalars.symbol(slot);
      if (symbol >= 0 && values[symbol] === undefined) {
        values[symbol] = BigInt(shape[dim]);
        origin[symbol] = `dim ${dim} of ${program.buffers[index].name}`;
      }
    });
  }
  program.symbols.forEach(({ name, lower, upper }, at) => {
    const value = values[at];
    if (value === undefined) throw new ModelError(`${program.name}: no dim of an argument gives ${name}.`);
    if (value < BigInt(lower) || (upper !== null && value > BigInt(upper))) {
      const bounds = upper === null ? `at least ${lower}` : `from ${lower} to ${upper}`;
      throw new ModelError(
        `${program.name}: expected ${name} ${bounds}, got ${value} (${origin[at]}); give a ${value < BigInt(lower) ? "larger" : "smaller"} ` +
          `input, or build with --bound ${name}=LOW:HIGH.`,
      );
    }
  });
  const slots = scalars.evaluate(values);
  for (const [index, { shape }] of given) {
    program.buffers[index].shape.forEach((slot, dim) => {
      if (BigInt(shape[dim]) !== slots[slot]) {
        throw new ModelError(
          `${program.name}: parameter ${program.buffers[index].name}: expected ${slots[slot]} in dim ${dim}, got ${shape[dim]}; ` +
            "make the dims agree.",
        );
      }
    });
  }
  return values;
}

/** Throw for elements outside the range that the model uses them in, such as a token beyond the vocabulary. */
export function checkValues(program: Program, given: ReadonlyMap<number, Argument>, values: readonly bigint[]): void {
  for (const [index, argument] of given) {
    const { fill, dtype } = program.buffers[index];
    if (fill.kind === "integers" && /^u?int(8|16|32|64)$/.test(dtype) && !(argument instanceof DeviceTensor)) {
      checkRange(program, index, argument.data, BigInt(fill.low), BigInt(fill.high));
    }
  }
  for (const { buffer, low, high, every, column } of program.ranges) {
    const argument = given.get(buffer);
    if (argument && !(argument instanceof DeviceTensor)) {
      checkRange(program, buffer, argument.data, values[low], values[high], every, column);
    }
  }
}

function checkRange(program: Program, index: number, data: Data, low: bigint, high: bigint, every = 1, column = 0): void {
  for (let at = column; at < data.length; at += every) {
    if (data[at] < low || data[at] >= high) {
      throw new ModelError(
        `${program.name}: parameter ${program.buffers[index].name}: expected values from ${low} to ${high - 1n}, which the model uses as ` +
          `indices, got ${data[at]} at ${at}; does the tokenizer belong to this model?`,
      );
    }
  }
}

/** Throw for indices that a call computed and used outside their range. */
export function checkComputed(
  program: Program,
  { operator, every, column }: Program["checked"][number],
  data: Data,
  shape: readonly number[],
  size: bigint,
): void {
  for (let at = column; at < data.length; at += every) {
    if (data[at] < 0 || data[at] >= size) {
      throw new ModelError(
        `${program.name}: ${operator}: expected indices of at least 0 and below ${size}, got ${data[at]} at ${at} of ${shape.join(" x ")}.`,
      );
    }
  }
}
