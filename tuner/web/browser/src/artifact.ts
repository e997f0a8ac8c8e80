/** Reading an artifact (`.rta`) as it arrives: a zip of stored members, see runtime/hashed_zip.py and runtime/artifact.py. */

import { type HashedStream, type Progress, type Source, download } from "./download.js";
import { ModelError } from "./errors.js";
import type { Gpu } from "./gpu.js";
import { type Program, readPrograms } from "./program.js";
import { type GpuMemory, count, itemBytes } from "./tensor.js";

const FORMAT = "relax-tune artifact";
const SCHEMA = 2;
const STAGING = 1 << 20;
const IN_FLIGHT = 32 << 20; // bytes that are written before the device is waited for
const LOCAL_HEADER = 0x04034b50;
const BRANCHING = "drivers.json";
const TENSOR_TYPES: Record<string, string> = {
  BOOL: "bool", I8: "int8", U8: "uint8", I16: "int16", U16: "uint16", I32: "int32", U32: "uint32", I64: "int64", U64: "uint64",
  F16: "float16", BF16: "bfloat16", F32: "float32", F64: "float64",
};

/** The manifest: where and for what the artifact was built. */
export interface Manifest {
  format: string;
  schema: number;
  tool_version: string;
  device_kind: string;
  members: Record<string, unknown>;
  extra: Record<string, unknown>;
}

/** A verified artifact, with its constants in the device's memory. */
export interface Artifact {
  manifest: Manifest;
  programs: Program[];
  constants: Map<string, GpuMemory>;
}

interface Member {
  name: string;
  bytes: number;
}

/** Download an artifact, copy its constants to the device, and verify it as a whole. Throws ModelError. */
export async function readArtifact(source: Source, gpu: Gpu, progress: Progress): Promise<Artifact> {
  const constants = new Map<string, GpuMemory>();
  try {
    return await download(source, progress, async (stream) => {
      const manifest = await readManifest(stream);
      const programs = readPrograms(decode(await stream.take((await member(stream, "programs.json")).bytes)));
      await readConstants(stream, await member(stream, "constants.safetensors"), gpu, constants);
      await stream.finish(source.digest);
      checkConstants(programs, constants);
      return { manifest, programs, constants };
    });
  } catch (error) {
    for (const { buffer } of constants.values()) buffer.destroy();
    throw error;
  }
}

export function damaged(what: string): ModelError {
  return new ModelError(`This is no artifact that the page can read: ${what}. Build it again with this version of relax-tune.`);
}

export function decode(bytes: Uint8Array): string {
  return new TextDecoder().decode(bytes);
}

/** Read the header of the next member. */
export async function member(stream: HashedStream, wanted: string): Promise<Member> {
  const head = new DataView((await stream.take(30)).buffer);
  if (head.getUint32(0, true) !== LOCAL_HEADER || head.getUint16(8, true) !== 0 || head.getUint16(6, true) & 9) {
    throw damaged("it is not a zip of stored members");
  }
  const name = decode(await stream.take(head.getUint16(26, true)));
  const extra = new DataView((await stream.take(head.getUint16(28, true))).buffer);
  let bytes = head.getUint32(22, true);
  if (bytes === 0xffffffff) {
    let at = 0; // of the field of 64-bit sizes; another one may pad the member to a page
    while (at + 4 <= extra.byteLength && extra.getUint16(at, true) !== 1) at += 4 + extra.getUint16(at + 2, true);
    if (at + 12 > extra.byteLength) throw damaged(`its member ${name} has no size`);
    bytes = Number(extra.getBigUint64(at + 4, true));
  }
  if (name !== wanted) throw damaged(`expected the member ${wanted}, got ${name.slice(0, 80)}`);
  return { name, bytes };
}

async function readManifest(stream: HashedStream): Promise<Manifest> {
  const { bytes } = await member(stream, "manifest.json");
  const manifest = JSON.parse(decode(await stream.take(bytes))) as Manifest;
  if (manifest.format !== FORMAT) throw damaged(`its manifest says ${String(manifest.format).slice(0, 80)}`);
  if (manifest.schema !== SCHEMA) throw damaged(`expected schema ${SCHEMA}, got ${manifest.schema}`);
  if (manifest.device_kind !== "webgpu") {
    throw new ModelError(
      `This artifact was built for ${manifest.device_kind}, and a browser runs those for webgpu; build it with --target webgpu.`,
    );
  }
  if (BRANCHING in manifest.members) {
    throw new ModelError(
      "This artifact has functions that branch or depend on data, which the browser's runtime does not run; use `relax-tune run`.",
    );
  }
  return manifest;
}

interface Entry {
  dtype: string;
  shape: number[];
  data_offsets: [number, number];
}

/** Read safetensors; each tensor is written to the device as its bytes come. */
async function readConstants(stream: HashedStream, { bytes }: Member, gpu: Gpu, constants: Map<string, GpuMemory>): Promise<void> {
  const length = Number(new DataView((await stream.take(8)).buffer).getBigUint64(0, true));
  const header = JSON.parse(decode(await stream.take(length))) as Record<string, Entry>;
  const entries = Object.entries(header).filter(([name]) => name !== "__metadata__");
  entries.sort(([, a], [, b]) => a.data_offsets[0] - b.data_offsets[0] || a.data_offsets[1] - b.data_offsets[1]);
  let at = 0;
  let flight = 0;
  for (const [name, { dtype, shape, data_offsets }] of entries) {
    const wanted = count(shape) * itemBytes(TENSOR_TYPES[dtype] ?? "uint8");
    if (data_offsets[0] !== at || data_offsets[1] - at !== wanted) throw damaged(`its constant ${name} has another size`);
    at = data_offsets[1];
    const memory = await gpu.alloc(wanted, `the constant ${name}`);
    constants.set(name, memory);
    await writeConstant(stream, wanted, memory, gpu);
    flight += wanted;
    if (flight > IN_FLIGHT) {
      await gpu.guard("copying constants", () => gpu.device.queue.onSubmittedWorkDone());
      flight = 0;
    }
  }
  if (8 + length + at !== bytes) throw damaged("its constants have another size");
}

async function writeConstant(stream: HashedStream, bytes: number, memory: GpuMemory, gpu: Gpu): Promise<void> {
  const staging = new Uint8Array(Math.min(bytes, STAGING));
  let held = 0;
  let written = 0;
  for await (let piece of stream.pieces(bytes)) {
    while (piece.length) {
      const part = piece.subarray(0, staging.length - held);
      staging.set(part, held);
      held += part.length;
      piece = piece.subarray(part.length);
      if (held === staging.length) {
        gpu.write(memory, staging, written);
        written += held;
        held = 0;
      }
    }
  }
  if (held) gpu.write(memory, staging.subarray(0, held), written);
}

/** Throw unless every program's constants are there. */
function checkConstants(programs: readonly Program[], constants: ReadonlyMap<string, GpuMemory>): void {
  for (const program of programs) {
    for (const { role, name } of program.buffers) {
      if (role === "const" && !constants.has(name)) throw damaged(`its constant ${name} is missing`);
    }
  }
}
