/** The device of a measuring page: what the server asks of it, one ask at a time; see tuner/measure/browser/protocol.py. */

import { ModelError } from "./errors.js";
import { type Compiled, Gpu, type Launch } from "./gpu.js";
import type { GpuMemory } from "./tensor.js";

/** A launch as the server asks for it. */
interface AskedLaunch {
  kernel: number;
  buffers: number[];
  scalars: number[];
  grid: number[];
}

/** An ask, after `checkAsk`. */
export type Ask = { id: number } & (
  | { kind: "compile"; kernel: number; name: string; source: string }
  | { kind: "alloc"; buffer: number; bytes: number }
  | { kind: "free"; buffer: number }
  | { kind: "fill"; buffer: number; bytes: number; value: number }
  | { kind: "write"; buffer: number; offset: number; keep: number }
  | { kind: "again"; buffer: number; offset: number; piece: number }
  | { kind: "forget"; piece: number }
  | { kind: "copy"; target: number; source: number; bytes: number }
  | { kind: "read"; buffer: number; offset: number; bytes: number }
  | { kind: "run"; launches: AskedLaunch[]; before: AskedLaunch[]; repeats: number; timed: boolean }
);

/** An answer, and the bytes that go with it. */
export interface Answer {
  message: Record<string, unknown>;
  data?: Uint8Array;
}

const CHUNK = 1 << 20;
const MOST_LAUNCHES = 1 << 12;
const MOST_REPEATS = 1 << 12;
const MOST_KEPT = 128;
const MOST_SOURCE = 8 << 20;
const FILL = 4 << 20;

const wholes: Record<string, readonly string[]> = {
  compile: ["kernel"],
  alloc: ["buffer", "bytes"],
  free: ["buffer"],
  fill: ["buffer", "bytes", "value"],
  write: ["buffer", "offset", "keep"],
  again: ["buffer", "offset", "piece"],
  forget: ["piece"],
  copy: ["target", "source", "bytes"],
  read: ["buffer", "offset", "bytes"],
  run: ["repeats"],
};

function isWhole(value: unknown, most = Number.MAX_SAFE_INTEGER): boolean {
  return Number.isSafeInteger(value) && (value as number) >= 0 && (value as number) <= most;
}

function areWholes(value: unknown, most: number): boolean {
  return Array.isArray(value) && value.length <= most && value.every((x) => Number.isSafeInteger(x));
}

function isLaunch(value: unknown): boolean {
  const { kernel, buffers, scalars, grid } = Object(value) as Record<string, unknown>;
  return isWhole(kernel) && areWholes(buffers, 64) && areWholes(scalars, 1024) && areWholes(grid, 3);
}

/** Return the server's message as an ask. Throws for any other message: page and server do not trust each other. */
export function checkAsk(message: Record<string, unknown>): Ask {
  const fields = wholes[String(message.kind)];
  const { kind, launches, before } = message;
  let fits = fields !== undefined && isWhole(message.id) && fields.every((name) => isWhole(message[name]));
  if (kind === "compile") fits &&= [message.name, message.source].every((x) => typeof x === "string" && x.length <= MOST_SOURCE);
  if (kind === "read") fits &&= (message.bytes as number) <= CHUNK;
  if (kind === "fill") fits &&= (message.value as number) <= 255;
  if (kind === "run") {
    for (const list of [launches, before]) fits &&= Array.isArray(list) && list.length <= MOST_LAUNCHES && list.every(isLaunch);
    fits &&= typeof message.timed === "boolean" && isWhole(message.repeats, MOST_REPEATS) && message.repeats !== 0;
  }
  if (!fits) throw new ModelError(`The server sent a message that this page does not know (${String(kind).slice(0, 40)}); load it again.`);
  return message as unknown as Ask;
}

export class Bench {
  readonly timer: "timestamp-query" | "clock";
  private readonly kernels = new Map<number, Compiled>();
  private readonly memory = new Map<number, GpuMemory>();
  private readonly queries: GPUQuerySet | null;
  private readonly stamps: GPUBuffer | null;

  private constructor(
    readonly gpu: Gpu,
    private readonly kept: Map<number, Uint8Array>,
  ) {
    const { device } = gpu;
    this.timer = device.features.has("timestamp-query") ? "timestamp-query" : "clock";
    const stamped = this.timer === "timestamp-query";
    this.queries = stamped ? device.createQuerySet({ type: "timestamp", count: 2 }) : null;
    const usage = GPUBufferUsage.QUERY_RESOLVE | GPUBufferUsage.COPY_SRC;
    this.stamps = stamped ? device.createBuffer({ size: 16, usage }) : null;
  }

  /** Open a device. kept: pieces of arrays in the page's memory, which may be used on several devices in turn */
  static async open(kept: Map<number, Uint8Array>): Promise<Bench> {
    return new Bench(await Gpu.open(["timestamp-query"]), kept);
  }

  /** The description of this device for the server. */
  facts(): Record<string, unknown> {
    const { adapter, device } = this.gpu;
    const { vendor, architecture, device: model, description } = adapter.info;
    const limits: Record<string, number> = {};
    for (const name in device.limits) {
      const value = (device.limits as unknown as Record<string, unknown>)[name];
      if (typeof value === "number") limits[name] = value;
    }
    const fallback = adapter.info.isFallbackAdapter === true;
    return {
      kind: "ready",
      agent: navigator.userAgent.slice(0, 600),
      adapter: { vendor, architecture, device: model, description, fallback },
      limits,
      timer: this.timer,
    };
  }

  /** Do what is asked. Throws where the device refuses it. data: the bytes of `write` */
  async answer(ask: Ask, data: Uint8Array): Promise<Answer> {
    const done = { message: { kind: "done", id: ask.id } };
    const { gpu } = this;
    switch (ask.kind) {
      case "compile": {
        const made = await gpu.compile([{ name: ask.name, source: ask.source, language: "webgpu" }], () => undefined);
        this.kernels.set(ask.kernel, made.get(ask.name) as Compiled);
        return done;
      }
      case "alloc":
        this.memory.set(ask.buffer, await gpu.alloc(ask.bytes, "an array"));
        return done;
      case "free":
        this.of(ask.buffer).buffer.destroy();
        this.memory.delete(ask.buffer);
        return done;
      case "fill": {
        const memory = this.of(ask.buffer);
        const part = new Uint8Array(Math.min(ask.bytes, FILL)).fill(ask.value);
        for (let at = 0; at < ask.bytes; at += FILL) gpu.write(memory, part.subarray(0, Math.min(FILL, ask.bytes - at)), at);
        await gpu.guard("filling memory", () => gpu.device.queue.onSubmittedWorkDone());
        return done;
      }
      case "write":
        if (ask.keep) {
          if (this.kept.size >= MOST_KEPT) throw new ModelError("The server asks this page to store too much; load it again.");
          this.kept.set(ask.keep, data);
        }
        await this.write(ask.buffer, data, ask.offset);
        return done;
      case "again": {
        const found = this.kept.get(ask.piece);
        if (!found) throw new ModelError(`The server asked for the array ${ask.piece}, which this page does not have.`);
        await this.write(ask.buffer, found, ask.offset);
        return done;
      }
      case "forget":
        this.kept.delete(ask.piece);
        return done;
      case "copy": {
        const encoder = gpu.device.createCommandEncoder();
        const bytes = Math.ceil(ask.bytes / 4) * 4;
        encoder.copyBufferToBuffer(this.of(ask.source).buffer, 0, this.of(ask.target).buffer, 0, bytes);
        gpu.device.queue.submit([encoder.finish()]);
        await gpu.guard("copying", () => gpu.device.queue.onSubmittedWorkDone());
        return done;
      }
      case "read":
        return { message: { kind: "data", id: ask.id }, data: await this.read(ask.buffer, ask.offset, ask.bytes) };
      case "run":
        return this.run(ask);
    }
  }

  private of(number: number): GpuMemory {
    const found = this.memory.get(number);
    if (!found) throw new ModelError(`The server asked for memory ${number}, which it does not have.`);
    return found;
  }

  private async write(number: number, data: Uint8Array, offset: number): Promise<void> {
    const { gpu } = this;
    gpu.write(this.of(number), data, offset);
    await gpu.guard("an array", () => gpu.device.queue.onSubmittedWorkDone());
  }

  private async read(number: number, offset: number, bytes: number): Promise<Uint8Array> {
    const { gpu } = this;
    const whole = Math.ceil(bytes / 4) * 4;
    const usage = GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST;
    const staging = gpu.device.createBuffer({ size: Math.max(whole, 4), usage });
    const encoder = gpu.device.createCommandEncoder();
    encoder.copyBufferToBuffer(this.of(number).buffer, offset, staging, 0, whole);
    gpu.device.queue.submit([encoder.finish()]);
    await gpu.guard("reading an array", () => staging.mapAsync(GPUMapMode.READ));
    const found = new Uint8Array(staging.getMappedRange().slice(0, bytes));
    staging.destroy();
    return found;
  }

  /** Run launches so many times over, and say how long they took if asked, without what comes before each. */
  private async run(ask: Ask & { kind: "run" }): Promise<Answer> {
    const { gpu } = this;
    const own: GPUBuffer[] = [];
    try {
      gpu.device.pushErrorScope("validation");
      const [launches, before] = [ask.launches, ask.before].map((list) =>
        list.map((one) => this.launch(one, own)).filter((launch) => launch !== null),
      );
      for (const { copies } of [...launches, ...before]) for (const [, apart] of copies) own.push(apart);
      const refused = await gpu.device.popErrorScope();
      if (refused) throw new ModelError(refused.message.slice(0, 2000));
      let secs = 0;
      if (!before.length) secs = await this.submitted(launches, ask.repeats, ask.timed);
      else {
        for (let time = 0; time < ask.repeats; time++) {
          await this.submitted(before, 1, false);
          secs += await this.submitted(launches, 1, ask.timed);
        }
      }
      return { message: ask.timed ? { kind: "times", id: ask.id, secs: [secs] } : { kind: "done", id: ask.id } };
    } finally {
      for (const buffer of own) buffer.destroy();
    }
  }

  /** Submit launches and wait for them; return their seconds, by timestamps where they are to be timed and the adapter has some. */
  private async submitted(launches: readonly Launch[], repeats: number, timed: boolean): Promise<number> {
    const { gpu } = this;
    const { device } = gpu;
    const stamped = timed && this.queries !== null;
    device.pushErrorScope("validation");
    const encoder = device.createCommandEncoder();
    this.encode(encoder, launches, repeats, stamped);
    const commands = encoder.finish();
    const refused = device.popErrorScope();
    const began = performance.now();
    device.queue.submit([commands]);
    await gpu.guard("a launch", () => device.queue.onSubmittedWorkDone());
    const passed = (performance.now() - began) / 1e3;
    const trouble = await refused;
    if (trouble) throw new ModelError(trouble.message.slice(0, 2000));
    return stamped ? this.stamped() : passed;
  }

  private launch({ kernel, buffers, scalars, grid }: AskedLaunch, own: GPUBuffer[]): Launch | null {
    const { gpu } = this;
    const compiled = this.kernels.get(kernel);
    if (!compiled) throw new ModelError(`The server asked for kernel ${kernel}, which it did not send.`);
    let place: GPUBufferBinding | null = null;
    if (scalars.length) {
      const size = Math.ceil(scalars.length / 4) * 16;
      const buffer = gpu.device.createBuffer({ size, usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST });
      own.push(buffer);
      gpu.device.queue.writeBuffer(buffer, 0, new Int32Array(scalars));
      place = { buffer };
    }
    return gpu.launch(compiled, buffers.map((number) => this.of(number).buffer), place, grid);
  }

  /** Encode launches; if asked, with timestamps at the begin of the first pass and at the end of the last one. */
  private encode(encoder: GPUCommandEncoder, launches: readonly Launch[], repeats: number, stamped: boolean): void {
    const querySet = this.queries as GPUQuerySet;
    const apart = launches.some(({ copies }) => copies.length);
    const begin = { querySet, beginningOfPassWriteIndex: 0 };
    const both = { ...begin, endOfPassWriteIndex: 1 };
    let pass: GPUComputePassEncoder | null = encoder.beginComputePass(stamped ? { timestampWrites: apart ? begin : both } : {});
    for (let time = 0; time < repeats; time++) {
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
    }
    pass?.end();
    if (!stamped) return;
    if (apart) encoder.beginComputePass({ timestampWrites: { querySet, endOfPassWriteIndex: 1 } }).end();
    encoder.resolveQuerySet(querySet, 0, 2, this.stamps as GPUBuffer, 0);
  }

  /** Return the seconds between the last two timestamps; 0 where the later one is not later. */
  private async stamped(): Promise<number> {
    const { gpu } = this;
    const staging = gpu.device.createBuffer({ size: 16, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    const encoder = gpu.device.createCommandEncoder();
    encoder.copyBufferToBuffer(this.stamps as GPUBuffer, 0, staging, 0, 16);
    gpu.device.queue.submit([encoder.finish()]);
    await gpu.guard("reading timestamps", () => staging.mapAsync(GPUMapMode.READ));
    const [began, ended] = new BigUint64Array(staging.getMappedRange().slice(0));
    staging.destroy();
    return ended > began ? Number(ended - began) / 1e9 : 0;
  }
}
