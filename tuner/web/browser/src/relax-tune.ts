/** The browser's runtime: artifacts of relax-tune on WebGPU and on WebAssembly, without a framework. */

export { Tokenizer } from "@huggingface/tokenizers";
export type { Source } from "./download.js";
export { ModelError, inWords } from "./errors.js";
export { size } from "./gpu.js";
export { Model, type ModelSource, Session } from "./model.js";
export { parseExact } from "./program.js";
export { ScalarList } from "./scalars.js";
export { DeviceTensor, type Tensor, tensor } from "./tensor.js";
export type { WasmSource } from "./wasm.js";
