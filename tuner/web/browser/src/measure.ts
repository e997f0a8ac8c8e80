/** The measuring page: joins a tuning job by the token of its address, and answers what the job asks of this browser's device. */

import { type Answer, type Ask, Bench, checkAsk } from "./bench.js";
import { ModelError, inWords } from "./errors.js";

const PROTOCOL = 1;
const MOST_JSON = 16 << 20;
const MOST_WORDS = 8000;
const OPEN_SECS = 30;
const RETRY_SECS = 600;
const LEFT = 1000;
const HIDDEN = 4001;

interface Job {
  socket: WebSocket;
  bench: Bench | null;
  // Answers of an earlier device are not sent.
  device: number;
  turn: Promise<void>;
  kept: Map<number, Uint8Array>;
}

let job: Job | null = null;
let over = false;
let stopped = false;
let lastSeen = performance.now();
let wait = 1;
let lock: WakeLockSentinel | null = null;
const counts = { kernels: 0, runs: 0, devices: 0 };

function element<T extends HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

function say(text: string): void {
  element("status").textContent = text;
}

function trouble(words: string): void {
  const shown = element("trouble");
  shown.hidden = words === "";
  shown.textContent = words;
}

function count(): void {
  element("kernels").textContent = counts.kernels.toLocaleString("en");
  element("runs").textContent = counts.runs.toLocaleString("en");
}

/** The token is only in the address, so that the page reconnects when it is reloaded. */
function token(): string {
  return decodeURIComponent(location.hash.slice(1));
}

function written({ message, data }: Answer): string | Uint8Array<ArrayBuffer> {
  if (!data) return JSON.stringify(message);
  const head = new TextEncoder().encode(JSON.stringify(message));
  const whole = new Uint8Array(4 + head.length + data.length);
  new DataView(whole.buffer).setUint32(0, head.length, true);
  whole.set(head, 4);
  whole.set(data, 4 + head.length);
  return whole;
}

/** Return the message of a frame, and its bytes. Throws for a frame that is none. */
function read(frame: string | ArrayBuffer): { message: Record<string, unknown>; data: Uint8Array } {
  let text: string;
  let data = new Uint8Array(0);
  if (typeof frame === "string") text = frame;
  else {
    const length = frame.byteLength >= 4 ? new DataView(frame).getUint32(0, true) : Infinity;
    if (length > frame.byteLength - 4) throw new ModelError("The server sent a frame that this page cannot read; load it again.");
    text = new TextDecoder().decode(new Uint8Array(frame, 4, length));
    data = new Uint8Array(frame, 4 + length);
  }
  if (text.length > MOST_JSON) throw new ModelError("The server sent more at once than this page takes; load it again.");
  const message: unknown = JSON.parse(text);
  if (typeof message !== "object" || message === null) throw new ModelError("The server sent no message; load the page again.");
  return { message: message as Record<string, unknown>, data };
}

function within<T>(secs: number, what: Promise<T>): Promise<T> {
  const late = new Promise<never>((_, fail) => {
    setTimeout(() => fail(new ModelError("The browser gave no device in time. Close the browser, and open the job's new address.")), secs * 1e3);
  });
  return Promise.race([what, late]);
}

/** Open a device and tell the job. */
async function prepare(mine: Job): Promise<void> {
  const number = ++mine.device;
  mine.turn = Promise.resolve();
  say("Opening the graphics device");
  try {
    const bench = await within(OPEN_SECS, Bench.open(mine.kept));
    if (job !== mine || mine.device !== number) return bench.gpu.device.destroy();
    mine.bench = bench;
    counts.devices++;
    void bench.gpu.device.lost.then((info) => {
      if (job !== mine || mine.device !== number) return;
      mine.socket.send(JSON.stringify({ kind: "lost", message: (info.message || info.reason || "no reason given").slice(0, MOST_WORDS) }));
      void prepare(mine);
    });
    const facts = bench.facts();
    element("adapter").textContent = bench.gpu.name;
    element("timer").textContent = bench.timer === "clock" ? "this page's clock, since the adapter has no timestamps" : "the adapter's timestamps";
    mine.socket.send(JSON.stringify(facts));
    say("Measuring. Keep this page in front, and the screen on.");
    document.body.dataset.ready = String(counts.devices);
  } catch (error) {
    if (job !== mine) return;
    mine.socket.send(JSON.stringify({ kind: "unable", message: inWords(error).slice(0, MOST_WORDS) }));
    end("Not measuring", inWords(error));
  }
}

async function answered(mine: Job, bench: Bench, ask: Ask, data: Uint8Array): Promise<Answer> {
  try {
    const answer = await bench.answer(ask, data);
    if (ask.kind === "compile") counts.kernels++;
    if (ask.kind === "run") counts.runs++;
    return answer;
  } catch (error) {
    const words = inWords(error).slice(0, MOST_WORDS);
    const what = ask.kind === "compile" ? "compile" : /too little memory|in one piece/.test(words) ? "memory" : "device";
    return { message: { kind: "failed", id: ask.id, what, message: words } };
  } finally {
    if (job === mine) count();
  }
}

function hear(mine: Job, frame: string | ArrayBuffer): void {
  const { message, data } = read(frame);
  lastSeen = performance.now();
  switch (message.kind) {
    case "welcome":
      wait = 1;
      history.replaceState(null, "", `#${encodeURIComponent(String(message.token))}`);
      void prepare(mine);
      return;
    case "refused":
      end("Not measuring", String(message.message));
      return;
    case "over":
      end(String(message.message), "");
      return;
    case "abandon":
      trouble(String(message.message));
      abandon(mine);
      void prepare(mine);
      return;
    default: {
      const ask = checkAsk(message);
      const { bench, device } = mine;
      if (!bench) throw new ModelError("The server asked before this page was ready; load it again.");
      mine.turn = mine.turn.then(async () => {
        const answer = await answered(mine, bench, ask, data);
        if (job === mine && mine.device === device && !bench.gpu.lost) mine.socket.send(written(answer));
      });
    }
  }
}

/** Destroy the device: whatever runs on it ends, or its answer is not waited for. */
function abandon(mine: Job): void {
  const { bench } = mine;
  mine.device++;
  mine.bench = null;
  bench?.gpu.device.destroy();
}

/** Part from the job for good. */
function end(status: string, words: string): void {
  over = true;
  leave(LEFT);
  say(status);
  trouble(words);
  element<HTMLButtonElement>("stop").disabled = true;
}

function leave(code: number): void {
  const mine = job;
  job = null;
  if (mine) {
    abandon(mine);
    mine.socket.close(code);
  }
  void lock?.release().catch(() => undefined);
  lock = null;
  delete document.body.dataset.ready;
}

function join(): void {
  if (job || over || stopped || document.hidden) return;
  if (!token()) return end("Not measuring", "This address has no token. Open the whole address that the job printed.");
  say("Connecting");
  const socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/measure`);
  socket.binaryType = "arraybuffer";
  const mine: Job = { socket, bench: null, device: 0, turn: Promise.resolve(), kept: new Map() };
  job = mine;
  socket.onopen = () => {
    trouble("");
    socket.send(JSON.stringify({ kind: "join", protocol: PROTOCOL, token: token() }));
    void navigator.wakeLock?.request("screen").then(
      (found) => (lock = found),
      () => undefined,
    );
  };
  socket.onmessage = (event) => {
    if (job !== mine) return;
    try {
      hear(mine, event.data as string | ArrayBuffer);
    } catch (error) {
      end("Not measuring", inWords(error));
    }
  };
  socket.onclose = (event) => {
    if (job !== mine) return;
    leave(LEFT);
    if (performance.now() - lastSeen > RETRY_SECS * 1e3) return end("Not measuring", "The job does not answer any more.");
    say(`The connection was lost${event.reason ? ` (${event.reason})` : ""}; trying again`);
    setTimeout(join, wait * 1e3);
    wait = Math.min(2 * wait, 15);
  };
}

element("stop").addEventListener("click", (event) => {
  stopped = !stopped;
  (event.target as HTMLButtonElement).textContent = stopped ? "Go on measuring" : "Stop measuring";
  if (stopped) {
    leave(LEFT);
    say("Stopped. The job waits for this page, or for another.");
  } else join();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return join();
  if (job) {
    leave(HIDDEN);
    say("Hidden pages do not measure: it goes on when this page is in front again.");
  }
});
addEventListener("pagehide", () => leave(LEFT));
join();
