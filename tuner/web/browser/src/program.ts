/** The programs of an artifact, as `programs.json` has them; see runtime/program/program.py. */

import { ModelError } from "./errors.js";

export type Whole = number | bigint;

export interface Symbol {
  name: string;
  lower: Whole;
  upper: Whole | null;
}

export interface BufferSpec {
  name: string;
  dtype: string;
  shape: number[];
  role: "input" | "output" | "const" | "packed" | "temp" | "view";
  storage: number | null;
  fill: { kind: "normal" | "integers" | "offsets"; low: number; high: number };
  base: number | null;
  outer: number;
}

export interface Kernel {
  name: string;
  language: string;
  source: string;
}

export interface Step {
  kind: "kernel" | "library";
  target: string;
  buffers: number[];
  scalars: number[];
  grid: number[];
  local: number[];
}

export interface Program {
  name: string;
  schema: number;
  symbols: Symbol[];
  scalars: Whole[];
  checks: { slot: number; message: string; values: number[] }[];
  buffers: BufferSpec[];
  storages: number[];
  kernels: Kernel[];
  prepare: Step[];
  calls: { name: string; task: string; choice: number; variants: { label: string; key: string; steps: Step[] }[] }[];
  inputs: number[];
  outputs: number[];
  ranges: { buffer: number; low: number; high: number; every: number; column: number }[];
  checked: { buffer: number; operator: string; size: number; every: number; column: number }[];
}

const PROGRAM_SCHEMA = 1;
const LONG = /"[^"\\]*(?:\\.[^"\\]*)*"|-?\d{16,}/g;

/** Parse JSON; whole numbers of 16 digits and more become bigints, since numbers hold 53 bits. */
export function parseExact(text: string): unknown {
  const marked = text.replace(LONG, (found) => (found[0] === '"' ? found : `"\\u0000${found}"`));
  return JSON.parse(marked, (_, value) =>
    typeof value === "string" && value[0] === "\0" ? BigInt(value.slice(1)) : value,
  );
}

/** Read `programs.json`. Throws where it is of another schema, or its kernels are no WGSL. */
export function readPrograms(text: string): Program[] {
  let found: unknown;
  try {
    found = parseExact(text);
  } catch {
    throw new ModelError("The artifact's programs are no JSON; build it again.");
  }
  const programs = found as Program[];
  for (const program of programs) {
    if (program.schema !== PROGRAM_SCHEMA) {
      throw new ModelError(
        `The artifact has programs of schema ${program.schema}, and this page reads ${PROGRAM_SCHEMA}; build it again.`,
      );
    }
    for (const kernel of program.kernels) {
      if (kernel.language !== "webgpu") {
        throw new ModelError(`The artifact's kernels are in ${kernel.language}; build it with --target webgpu.`);
      }
    }
    const steps = [program.prepare, ...program.calls.flatMap((call) => call.variants.map((v) => v.steps))].flat();
    const library = steps.find((step) => step.kind === "library");
    if (library) {
      throw new ModelError(`The artifact calls the library routine ${library.target}, which no browser has; build it again.`);
    }
  }
  return programs;
}

/** Insert values for `{0}`, `{1}` ...; other braces stay as they are. */
export function formatMessage(message: string, values: readonly unknown[]): string {
  return message.replace(/\{(\d{1,6})\}/g, (_, at: string) => String(values[Number(at)]));
}
