/** Arrays in the page's memory and in the device's. */

import { ModelError } from "./errors.js";

export type Data =
  | Float32Array
  | Float64Array
  | Int8Array
  | Uint8Array
  | Int16Array
  | Uint16Array
  | Int32Array
  | Uint32Array
  | BigInt64Array
  | BigUint64Array;

type DataClass = { new (buffer: ArrayBuffer): Data; new (length: number): Data; readonly BYTES_PER_ELEMENT: number };

const CLASSES: Record<string, DataClass> = {
  float32: Float32Array,
  float64: Float64Array,
  int8: Int8Array,
  int16: Int16Array,
  uint16: Uint16Array,
  float16: Uint16Array, // its bits
  bfloat16: Uint16Array,
  int32: Int32Array,
  uint32: Uint32Array,
  int64: BigInt64Array,
  uint64: BigUint64Array,
} as unknown as Record<string, DataClass>;

/** Return the class of the arrays for an element type; types of at most 8 bits are stored as bytes. */
export function dataClass(dtype: string): DataClass {
  return CLASSES[dtype] ?? (Uint8Array as unknown as DataClass);
}

export function itemBytes(dtype: string): number {
  return dataClass(dtype).BYTES_PER_ELEMENT;
}

export function count(shape: readonly number[]): number {
  return shape.reduce((product, dim) => product * dim, 1);
}

/** An array in the page's memory, in C order. */
export interface Tensor {
  dtype: string;
  shape: number[];
  data: Data;
}

/** Make a tensor of numbers. */
export function tensor(dtype: string, shape: number[], numbers: readonly number[]): Tensor {
  const made = new (dataClass(dtype))(numbers.length);
  const big = made instanceof BigInt64Array || made instanceof BigUint64Array;
  for (let at = 0; at < numbers.length; at++) made[at] = big ? BigInt(numbers[at]) : numbers[at];
  return { dtype, shape, data: made };
}

/** Memory of the device, or of the WebAssembly module, that a caller owns. bytes: its size */
export interface Memory {
  readonly bytes: number;
  free(): void;
}

export interface GpuMemory extends Memory {
  buffer: GPUBuffer;
}

/** An array in the device's memory, stored with the dim `outer` first. `free` gives the memory back. */
export class DeviceTensor {
  constructor(
    readonly dtype: string,
    readonly shape: number[],
    readonly outer: number,
    readonly memory: Memory,
  ) {}

  free(): void {
    this.memory.free();
  }
}

/** Return an array's bytes with the dim `from` moved to the place `to`. */
export function moveDim(source: Tensor, from: number, to: number): Tensor {
  if (from === to || source.shape.length < 2) return source;
  const order = source.shape.map((_, at) => at).filter((at) => at !== from);
  order.splice(to, 0, from);
  const shape = order.map((at) => source.shape[at]);
  const strides: number[] = new Array(source.shape.length);
  for (let at = source.shape.length - 1, stride = 1; at >= 0; at--) {
    strides[at] = stride;
    stride *= source.shape[at];
  }
  const steps = order.map((at) => strides[at]);
  const target = new (dataClass(source.dtype))(source.data.length);
  const index = shape.map(() => 0);
  for (let at = 0, place = 0; at < target.length; at++) {
    target[at] = source.data[place] as never;
    for (let dim = shape.length - 1; dim >= 0; dim--) {
      place += steps[dim];
      if (++index[dim] < shape[dim]) break;
      place -= steps[dim] * shape[dim];
      index[dim] = 0;
    }
  }
  return { dtype: source.dtype, shape, data: target };
}

/** Throw unless a tensor has the elements that its shape says, in arrays of its type. */
export function checkTensor(where: string, given: Tensor): void {
  const wanted = count(given.shape);
  if (given.data.length !== wanted || !(given.data instanceof dataClass(given.dtype))) {
    throw new ModelError(
      `${where}: expected ${wanted} elements of ${given.dtype} in an array of that type, got ${given.data.length} in a ` +
        `${given.data.constructor.name}.`,
    );
  }
}
