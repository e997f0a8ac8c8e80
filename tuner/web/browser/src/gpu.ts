/** The browser's WebGPU device: memory, kernels, transfers, and readable errors. */

import { ModelError } from "./errors.js";
import type { Kernel } from "./program.js";
import type { GpuMemory } from "./tensor.js";

const UNIT = 16; // sizes of buffers are multiples of this, as in runtime/device/webgpu
const BINDING = /@group\(0\) @binding\((\d+)\) var<(storage, read_write|storage, read|storage|uniform)>/g;
const LIMITS = [
  "maxBufferSize",
  "maxStorageBufferBindingSize",
  "maxStorageBuffersPerShaderStage",
  "maxComputeWorkgroupStorageSize",
  "maxComputeInvocationsPerWorkgroup",
  "maxComputeWorkgroupSizeX",
  "maxComputeWorkgroupSizeY",
  "maxComputeWorkgroupSizeZ",
  "maxComputeWorkgroupsPerDimension",
] as const;
const NONE =
  "This browser offers no WebGPU. Use a current Chrome, Edge, Safari or Firefox, and open the page from localhost or over https.";

export interface Compiled {
  name: string;
  pipeline: GPUComputePipeline;
  layout: GPUBindGroupLayout;
  writes: boolean[]; // by buffer
  takesScalars: boolean;
}

/** A dispatch: copies that come before it, and what it runs. */
export interface Launch {
  copies: [GPUBuffer, GPUBuffer][];
  kernel: Compiled;
  group: GPUBindGroup;
  grid: [number, number, number];
}

/** Return a size as readable text. */
export function size(bytes: number): string {
  return bytes < 1e6 ? `${bytes.toLocaleString("en")} bytes` : `${(bytes / 1e6).toFixed(1)} MB`;
}

export function rounded(bytes: number): number {
  return Math.max(Math.ceil(bytes / UNIT) * UNIT, UNIT);
}

export class Gpu {
  private lostBecause = "";
  private trouble = "";

  private constructor(
    readonly device: GPUDevice,
    readonly adapter: GPUAdapter,
    readonly name: string,
  ) {
    void device.lost.then((info) => {
      this.lostBecause = info.message || info.reason || "no reason given";
    });
    device.addEventListener("uncapturederror", (event) => {
      this.trouble ||= event.error.message;
      event.preventDefault();
    });
  }

  /** Open the browser's adapter with all that its limits allow, and these features where it has them. */
  static async open(wanted: readonly GPUFeatureName[] = []): Promise<Gpu> {
    const gpu: GPU | undefined = navigator.gpu;
    if (!gpu) throw new ModelError(NONE);
    const adapter = await gpu.requestAdapter({ powerPreference: "high-performance" });
    if (!adapter) {
      throw new ModelError(
        "This browser has WebGPU, but no adapter for it: the graphics driver is missing or blocked. Update the driver, or use another device.",
      );
    }
    const requiredLimits: Record<string, number> = {};
    for (const name of LIMITS) requiredLimits[name] = adapter.limits[name];
    try {
      const { vendor, architecture, description } = adapter.info;
      const label = description || [vendor, architecture].filter(Boolean).join(" ") || "an adapter without a name";
      const requiredFeatures = wanted.filter((name) => adapter.features.has(name));
      return new Gpu(await adapter.requestDevice({ requiredLimits, requiredFeatures }), adapter, label);
    } catch (error) {
      throw new ModelError(`The graphics adapter cannot be opened: ${(error as Error).message}`);
    }
  }

  get lost(): boolean {
    return this.lostBecause !== "";
  }

  close(): void {
    this.device.destroy();
  }

  /** Throw if the device is lost or has refused something. */
  check(what: string): void {
    if (this.lost) {
      throw new ModelError(
        `The graphics device was lost (${this.lostBecause}). Load the page again; if it happens again, give shorter inputs.`,
      );
    }
    if (this.trouble) {
      const said = this.trouble;
      this.trouble = "";
      throw new ModelError(`The graphics device refused ${what}: ${said.slice(0, 600)}`);
    }
  }

  /** Wait for something. Throws ModelError with the reason of a failure. */
  async guard<T>(what: string, work: () => Promise<T> | T): Promise<T> {
    this.check(what);
    let found: T;
    try {
      found = await work();
    } catch (error) {
      if (error instanceof ModelError) throw error;
      await Promise.race([this.device.lost, new Promise((done) => setTimeout(done, 200))]);
      this.check(what);
      throw new ModelError(`The graphics device failed at ${what}: ${(error as Error).message}`);
    }
    this.check(what);
    return found;
  }

  /** Allocate device memory. Throws where it is larger than allowed, or where there is too little. */
  async alloc(bytes: number, what: string): Promise<GpuMemory> {
    const { maxBufferSize, maxStorageBufferBindingSize } = this.device.limits;
    const most = Math.min(maxBufferSize, maxStorageBufferBindingSize);
    const whole = rounded(bytes);
    if (whole > most) {
      throw new ModelError(
        `${what} takes ${size(bytes)} in one piece, and this device allows ${size(most)}; use a shorter input or a smaller model.`,
      );
    }
    return this.guard(`memory for ${what}`, async () => {
      this.device.pushErrorScope("out-of-memory");
      const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
      const buffer = this.device.createBuffer({ size: whole, usage });
      if (await this.device.popErrorScope()) {
        throw new ModelError(
          `The graphics device has too little memory left for ${what} (${size(bytes)}); close other tabs, or use a shorter input or a ` +
            "smaller model.",
        );
      }
      return { buffer, bytes: whole, free: () => buffer.destroy() };
    });
  }

  /** Copy bytes to the start of device memory. */
  write(memory: GpuMemory, data: ArrayBufferView, offset = 0): void {
    const bytes = new Uint8Array(data.buffer as ArrayBuffer, data.byteOffset, data.byteLength);
    const whole = bytes.length - (bytes.length % 4);
    if (whole) this.device.queue.writeBuffer(memory.buffer, offset, bytes, 0, whole);
    if (bytes.length > whole) {
      const last = new Uint8Array(4); // the owner of the memory owns the rest of its last word too
      last.set(bytes.subarray(whole));
      this.device.queue.writeBuffer(memory.buffer, offset + whole, last);
    }
  }

  /** Compile kernels, side by side. */
  async compile(kernels: readonly Kernel[], done: () => void): Promise<Map<string, Compiled>> {
    const made = await Promise.all(
      kernels.map(async (kernel): Promise<[string, Compiled]> => {
        const compiled = await this.compiled(kernel);
        done();
        return [kernel.name, compiled];
      }),
    );
    return new Map(made);
  }

  private async compiled({ name, source }: Kernel): Promise<Compiled> {
    const kinds = [...source.matchAll(BINDING)].map((m) => ({ at: Number(m[1]), kind: m[2] })).sort((a, b) => a.at - b.at);
    const type = (kind: string): GPUBufferBindingType =>
      kind === "uniform" ? "uniform" : kind === "storage, read_write" ? "storage" : "read-only-storage";
    const { device } = this;
    return this.guard(`kernel ${name}`, async () => {
      const module = device.createShaderModule({ code: source });
      const layout = device.createBindGroupLayout({
        entries: kinds.map(({ at, kind }) => ({
          binding: at,
          visibility: GPUShaderStage.COMPUTE,
          buffer: { type: type(kind) },
        })),
      });
      try {
        const pipeline = await device.createComputePipelineAsync({
          layout: device.createPipelineLayout({ bindGroupLayouts: [layout] }),
          compute: { module, entryPoint: name },
        });
        const storage = kinds.filter(({ kind }) => kind !== "uniform");
        return {
          name,
          pipeline,
          layout,
          writes: storage.map(({ kind }) => kind === "storage, read_write"),
          takesScalars: storage.length < kinds.length,
        };
      } catch (error) {
        if (this.lost) throw error;
        const { messages } = await module.getCompilationInfo();
        const told = messages.find((m) => m.type === "error")?.message ?? (error as Error).message;
        this.trouble = "";
        throw new ModelError(`This browser refuses kernel ${name}: ${told.slice(0, 600)} Build for WebGPU on a device like this one.`);
      }
    });
  }

  /** Make a launch over these buffers. scalars: a part of a uniform buffer, for kernels that take integers */
  launch(
    kernel: Compiled,
    buffers: readonly GPUBuffer[],
    scalars: GPUBufferBinding | null,
    grid: readonly number[],
  ): Launch | null {
    if (buffers.length !== kernel.writes.length || (scalars !== null) !== kernel.takesScalars) {
      throw new ModelError(`The artifact gives kernel ${kernel.name} other arguments than it takes; build it again.`);
    }
    if (grid.some((extent) => extent === 0)) return null;
    const most = this.device.limits.maxComputeWorkgroupsPerDimension;
    if (grid.some((extent) => extent < 0 || extent > most)) {
      throw new ModelError(`Kernel ${kernel.name} needs ${grid.join(" x ")} groups, and this device allows ${most}; use a shorter input.`);
    }
    const written = new Set(buffers.filter((_, at) => kernel.writes[at]));
    const copies: [GPUBuffer, GPUBuffer][] = [];
    const used = buffers.map((buffer, at) => {
      if (kernel.writes[at] || !written.has(buffer)) return buffer;
      // WebGPU forbids to write what another binding reads
      const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST;
      const apart = this.device.createBuffer({ size: buffer.size, usage });
      copies.push([buffer, apart]);
      return apart;
    });
    const entries: GPUBindGroupEntry[] = used.map((buffer, binding) => ({ binding, resource: { buffer } }));
    if (scalars) entries.push({ binding: entries.length, resource: scalars });
    const group = this.device.createBindGroup({ layout: kernel.layout, entries });
    return { copies, kernel, group, grid: [grid[0] ?? 1, grid[1] ?? 1, grid[2] ?? 1] };
  }

  /** Encode launches, in order. */
  encode(encoder: GPUCommandEncoder, launches: readonly Launch[]): void {
    let pass: GPUComputePassEncoder | null = null;
    for (const { copies, kernel, group, grid } of launches) {
      if (copies.length) {
        pass?.end();
        pass = null;
        for (const [source, target] of copies) encoder.copyBufferToBuffer(source, 0, target, 0, source.size);
      }
      pass ??= encoder.beginComputePass();
      pass.setPipeline(kernel.pipeline);
      pass.setBindGroup(0, group);
      pass.dispatchWorkgroups(...grid);
    }
    pass?.end();
  }

  /** Return copies of the first bytes of several buffers. They are encoded after what `encoder` holds, which is submitted. */
  async read(encoder: GPUCommandEncoder, sources: readonly { buffer: GPUBuffer; bytes: number }[]): Promise<ArrayBuffer[]> {
    const { device } = this;
    return this.guard("reading results", async () => {
      const places: number[] = [];
      let total = 0;
      for (const { bytes } of sources) {
        places.push(total);
        total += rounded(bytes);
      }
      if (!total) {
        device.queue.submit([encoder.finish()]);
        return [];
      }
      const staging = device.createBuffer({ size: total, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
      sources.forEach(({ buffer, bytes }, at) => {
        const whole = Math.ceil(bytes / 4) * 4;
        if (whole) encoder.copyBufferToBuffer(buffer, 0, staging, places[at], whole);
      });
      device.queue.submit([encoder.finish()]);
      await staging.mapAsync(GPUMapMode.READ);
      const mapped = staging.getMappedRange();
      const found = sources.map(({ bytes }, at) => mapped.slice(places[at], places[at] + bytes));
      staging.destroy();
      return found;
    });
  }
}
