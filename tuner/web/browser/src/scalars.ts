/** The evaluator of a program's scalar list: whole numbers of 64 bits, as runtime/program/scalars.py defines them. */

import { ModelError } from "./errors.js";
import type { Whole } from "./program.js";

const WIDTH = 4;
export const CONST = 0;
export const SYMBOL = 1;
const LEAST = -(2n ** 63n);
const MOST = 2n ** 63n - 1n;
const COMPARISONS = 9; // opcodes from here to `NOT` give 0 or 1

function floordiv(a: bigint, b: bigint): bigint {
  const quotient = a / b;
  return quotient * b !== a && a < 0n !== b < 0n ? quotient - 1n : quotient;
}

function truth(opcode: number, a: bigint, b: bigint): boolean {
  switch (opcode) {
    case 9:
      return a < b;
    case 10:
      return a <= b;
    case 11:
      return a === b;
    case 12:
      return a !== b;
    case 13:
      return a !== 0n && b !== 0n;
    case 14:
      return a !== 0n || b !== 0n;
    default:
      return a === 0n; // NOT
  }
}

function whole(opcode: number, a: bigint, b: bigint, slot: number): bigint {
  switch (opcode) {
    case 2:
      return a + b;
    case 3:
      return a - b;
    case 4:
      return a * b;
    case 7:
      return a <= b ? a : b;
    case 8:
      return a >= b ? a : b;
  }
  if (b === 0n) throw new ModelError(`scalar slot ${slot}: ${a} is divided by zero; the program needs a check.`);
  return opcode === 5 ? floordiv(a, b) : a - floordiv(a, b) * b;
}

/** A scalar list, read once and evaluated for each binding of its symbols. */
export class ScalarList {
  readonly length: number;
  private readonly constants: bigint[];

  constructor(private readonly code: readonly Whole[]) {
    this.length = code.length / WIDTH;
    this.constants = Array.from({ length: this.length }, (_, slot) =>
      this.opcode(slot) === CONST ? BigInt(code[slot * WIDTH + 1]) : 0n,
    );
  }

  opcode(slot: number): number {
    return Number(this.code[slot * WIDTH]);
  }

  /** The symbol that a slot is, or -1. */
  symbol(slot: number): number {
    return this.opcode(slot) === SYMBOL ? Number(this.code[slot * WIDTH + 1]) : -1;
  }

  /** Return the value of every slot. Throws for a division by zero and for a result outside 64 bits. */
  evaluate(symbols: readonly bigint[]): bigint[] {
    const { code, constants } = this;
    const values: bigint[] = new Array(this.length);
    for (let slot = 0, at = 0; slot < this.length; slot++, at += WIDTH) {
      const opcode = code[at] as number;
      if (opcode === CONST) {
        values[slot] = constants[slot];
        continue;
      }
      const first = code[at + 1] as number;
      if (opcode === SYMBOL) {
        values[slot] = symbols[first];
        continue;
      }
      const a = values[first];
      const b = values[code[at + 2] as number];
      if (opcode === 16) {
        values[slot] = a !== 0n ? b : values[code[at + 3] as number];
      } else if (opcode >= COMPARISONS) {
        values[slot] = truth(opcode, a, b) ? 1n : 0n;
      } else {
        const value = whole(opcode, a, b, slot);
        if (value < LEAST || value > MOST) {
          throw new ModelError(`scalar slot ${slot}: the result ${value} does not fit in 64 bits; use smaller inputs.`);
        }
        values[slot] = value;
      }
    }
    return values;
  }

  /** Return the value of every slot that depends on no symbol, null for the others. */
  fixed(symbolCount: number): (bigint | null)[] {
    const depends: boolean[] = [];
    for (let slot = 0, at = 0; slot < this.length; slot++, at += WIDTH) {
      const opcode = this.opcode(slot);
      const operands = opcode === CONST ? 0 : opcode === SYMBOL ? -1 : opcode === 16 ? 3 : opcode === 15 ? 1 : 2;
      depends.push(operands < 0 || [1, 2, 3].slice(0, operands).some((k) => depends[Number(this.code[at + k])]));
    }
    const plain = this.code.map((x, at) => (depends[Math.floor(at / WIDTH)] ? 0 : x));
    const values = new ScalarList(plain).evaluate(new Array(symbolCount).fill(0n));
    return values.map((value, slot) => (depends[slot] ? null : value));
  }
}
