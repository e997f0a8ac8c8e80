// Compile WGSL texts with Tint, the compiler of Chromium (npm package webgpu: Dawn in node).
// Input: JSON [[name, text], ...] on stdin. Output: JSON [[name, error], ...] of those that Tint refuses.
import { createRequire } from "node:module";

const require = createRequire(process.argv[2] + "/");
const { create, globals } = require("webgpu");
Object.assign(globalThis, globals);

let input = "";
for await (const part of process.stdin) input += part;
const gpu = create(["backend=null"]); // compiles, and runs nothing; must live as long as its devices
const adapter = await gpu.requestAdapter();
const device = await adapter.requestDevice();
const refused = [];
for (const [name, code] of JSON.parse(input)) {
  device.pushErrorScope("validation");
  const module = device.createShaderModule({ code });
  const info = await module.getCompilationInfo();
  const errors = info.messages.filter((m) => m.type === "error").map((m) => `${m.lineNum}: ${m.message}`);
  await device.popErrorScope();
  if (errors.length) refused.push([name, errors.join("\n")]);
}
console.log(JSON.stringify(refused), gpu === null ? "" : "");
process.exit(0);
