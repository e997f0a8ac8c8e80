/** The artifact's bytes: from the network or the browser's cache, hashed as they arrive. */

import { blake2b } from "@noble/hashes/blake2.js";
import { ModelError } from "./errors.js";
import { size } from "./gpu.js";

const CACHE = "relax-tune";
const COMMENT = "blake2b:";
const TAIL = COMMENT.length + 64;

export interface Source {
  url: string;
  digest: string;
  bytes: number;
}

export type Progress = (done: number, total: number, from: "the network" | "the cache") => void;

/** A stream of bytes that is read in pieces of any length. */
export class ByteStream {
  protected chunk: Uint8Array<ArrayBuffer> = new Uint8Array(0);
  done = 0;

  constructor(
    private readonly reader: ReadableStreamDefaultReader<Uint8Array<ArrayBuffer>>,
    protected readonly total: number,
    private readonly progress: (done: number) => void,
  ) {}

  protected async more(): Promise<boolean> {
    let found: ReadableStreamReadResult<Uint8Array<ArrayBuffer>>;
    try {
      found = await this.reader.read();
    } catch {
      throw this.ended();
    }
    if (found.done) return false;
    this.chunk = found.value;
    this.done += this.chunk.length;
    this.progress(this.done);
    return true;
  }

  protected ended(): ModelError {
    return new ModelError(
      `The download ended after ${size(this.done)} of ${size(this.total)}; check the connection and load the page again.`,
    );
  }

  /** Yield the next bytes, in pieces as they come. */
  async *pieces(bytes: number): AsyncGenerator<Uint8Array<ArrayBuffer>> {
    let left = bytes;
    while (left > 0) {
      if (!this.chunk.length && !(await this.more())) throw this.ended();
      const piece = this.chunk.subarray(0, left);
      this.chunk = this.chunk.subarray(piece.length);
      left -= piece.length;
      if (piece.length) yield piece;
    }
  }

  /** Return the next bytes. */
  async take(bytes: number): Promise<Uint8Array<ArrayBuffer>> {
    const found = new Uint8Array(bytes);
    let at = 0;
    for await (const piece of this.pieces(bytes)) {
      found.set(piece, at);
      at += piece.length;
    }
    return found;
  }
}

/** A stream whose bytes are hashed on the way; the hash stands at its end. */
export class HashedStream extends ByteStream {
  private tail: Uint8Array = new Uint8Array(0);
  private readonly hash = blake2b.create({ dkLen: 32 });

  protected override async more(): Promise<boolean> {
    const found = await super.more();
    if (found) this.add(this.chunk);
    return found;
  }

  /** Hash all but the last bytes, which hold the hash. */
  private add(chunk: Uint8Array): void {
    if (chunk.length >= TAIL) {
      this.hash.update(this.tail);
      this.hash.update(chunk.subarray(0, chunk.length - TAIL));
      this.tail = chunk.slice(chunk.length - TAIL);
      return;
    }
    const joined = new Uint8Array(this.tail.length + chunk.length);
    joined.set(this.tail);
    joined.set(chunk, this.tail.length);
    const over = Math.max(joined.length - TAIL, 0);
    this.hash.update(joined.subarray(0, over));
    this.tail = joined.slice(over);
  }

  /** Read to the end. Throws unless the hash at the end is the hash of all bytes before it, and the expected one. */
  async finish(wanted: string): Promise<void> {
    this.chunk = this.chunk.subarray(this.chunk.length);
    while (await this.more()) this.chunk = this.chunk.subarray(this.chunk.length);
    if (this.done < this.total) throw this.ended();
    const told = new TextDecoder("latin1").decode(this.tail);
    const found = hexadecimal(this.hash.digest());
    if (told !== COMMENT + found || found !== wanted) throw altered();
  }
}

export function hexadecimal(bytes: Uint8Array): string {
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function altered(): ModelError {
  return new ModelError("The artifact's content does not fit its hash: it was altered or damaged on the way. Load the page again.");
}

/** Call `read` on the artifact's bytes. Verified bytes are stored in the browser's cache for the next time. */
export function download<T>(source: Source, progress: Progress, read: (stream: HashedStream) => Promise<T>): Promise<T> {
  return downloadAs(HashedStream, source, progress, read);
}

/** Call `read`, which verifies by itself, on the bytes of a file. */
export async function downloadAs<T, S extends ByteStream>(
  kind: new (...given: ConstructorParameters<typeof ByteStream>) => S,
  source: Source,
  progress: Progress,
  read: (stream: S) => Promise<T>,
): Promise<T> {
  const stream = (body: ReadableStream<Uint8Array<ArrayBuffer>>, told: (done: number) => void) =>
    new kind(body.getReader(), source.bytes, told);
  const key = new URL(source.url, globalThis.location?.href);
  key.searchParams.set("blake2b", source.digest);
  const cache = await openCache();
  const cached = await cache?.match(key.href);
  if (cached?.body) {
    try {
      return await read(stream(cached.body, (done) => progress(done, source.bytes, "the cache")));
    } catch (error) {
      await cache?.delete(key.href); // the next load asks the network
      throw error;
    }
  }
  let answer: Response;
  try {
    answer = await fetch(source.url);
  } catch {
    throw new ModelError("The artifact cannot be downloaded: the server does not answer. Is `relax-tune web` still running?");
  }
  if (!answer.ok || !answer.body) {
    throw new ModelError(`The artifact cannot be downloaded: the server answered ${answer.status}.`);
  }
  const [mine, kept] = cache ? answer.body.tee() : [answer.body, null];
  const keeping = kept && cache ? cache.put(key.href, new Response(kept)).catch(() => undefined) : Promise.resolve();
  try {
    const found = await read(stream(mine, (done) => progress(done, source.bytes, "the network")));
    await keeping;
    await forgetOthers(cache, key);
    return found;
  } catch (error) {
    void keeping.then(() => cache?.delete(key.href));
    throw error;
  }
}

/** Return the cache; null where the browser has none, as in some private windows. */
async function openCache(): Promise<Cache | null> {
  try {
    return await caches.open(CACHE);
  } catch {
    return null;
  }
}

/** Drop older artifacts of the same address. */
async function forgetOthers(cache: Cache | null, key: URL): Promise<void> {
  for (const { url } of (await cache?.keys()) ?? []) {
    if (new URL(url).pathname === key.pathname && url !== key.href) await cache?.delete(url);
  }
}
