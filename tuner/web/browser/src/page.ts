/** Shared parts of the example pages: loading with progress, the tokenizer, display of errors. */

import { Model, ModelError, type ModelSource, Tokenizer, inWords, size } from "./relax-tune.js";

/** What the server says of the artifact. ends: tokens that end a text */
type Facts = ModelSource & { name: string; tokenizer: boolean; ends: number[] };

/** A text as tokens and back. */
export interface Codec {
  encode(text: string): number[];
  decode(tokens: readonly number[]): string;
}

export interface Opened {
  model: Model;
  codec: Codec;
  ends: ReadonlySet<number>;
}

/** Return the element of the page with this id. */
export function element<T extends HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

export function say(text: string): void {
  element("status").textContent = text;
}

/** Show an error, or hide the last one. */
export function show(error: unknown): void {
  const trouble = element("trouble");
  trouble.hidden = error === null;
  trouble.textContent = error === null ? "" : inWords(error);
}

async function ask(path: string): Promise<unknown> {
  let answer: Response;
  try {
    answer = await fetch(path);
  } catch {
    throw new ModelError("The server does not answer. Is `relax-tune web` still running?");
  }
  if (!answer.ok) throw new ModelError(`The server answered ${answer.status} for ${path}: ${(await answer.text()).slice(0, 300)}`);
  return answer.json();
}

/** Tokens as numbers, for artifacts that are served without a tokenizer. */
const NUMBERS: Codec = {
  encode(text) {
    const words = text.split(/[\s,]+/).filter(Boolean);
    const wrong = words.find((word) => !/^\d{1,9}$/.test(word));
    if (wrong !== undefined) {
      throw new ModelError(`Expected token ids such as 12 7 305, got ${wrong.slice(0, 40)}; serve with --model FOLDER to write text.`);
    }
    return words.map(Number);
  },
  decode: (tokens) => tokens.join(" "),
};

async function openCodec(wanted: boolean): Promise<Codec> {
  if (!wanted) return NUMBERS;
  const [rules, settings] = (await Promise.all([ask("tokenizer.json"), ask("tokenizer_config.json")])) as [object, object];
  const tokenizer = new Tokenizer(rules, settings);
  return {
    encode: (text) => tokenizer.encode(text).ids,
    decode: (tokens) => tokenizer.decode([...tokens], { skip_special_tokens: true }),
  };
}

/** Load the served artifact; show progress, then the form. Errors are shown as messages. */
export async function open(ready: (opened: Opened) => void): Promise<void> {
  const progress = element<HTMLProgressElement>("progress");
  try {
    const facts = (await ask("model.json")) as Facts;
    element("name").textContent = facts.name;
    const codec = await openCodec(facts.tokenizer);
    element("numbers").hidden = facts.tokenizer;
    const model = await Model.load(
      facts,
      (done, total, from) => {
        progress.value = done / total;
        say(`Reading ${size(done)} of ${size(total)} from ${from}`);
      },
      (done, total) => {
        progress.value = done / total;
        say(`Compiling kernel ${done} of ${total}`);
      },
    );
    void model.gpu?.device.lost.then((info) => {
      if (info.reason !== "destroyed") {
        show(new ModelError(`The graphics device was lost (${info.message || "no reason given"}). Load the page again.`));
      }
    });
    ready({ model, codec, ends: new Set(facts.ends) });
    progress.hidden = true;
    element<HTMLFieldSetElement>("controls").disabled = false;
    say(`Ready, on ${model.device.name}${model.without && `. ${model.without}`}`);
    document.body.dataset.ready = "true";
  } catch (error) {
    progress.hidden = true;
    say("Not loaded");
    show(error);
  }
}

/** Run a task of a form, one at a time; show its errors. */
export function onSubmit(form: HTMLFormElement, task: () => Promise<void>): void {
  const controls = element<HTMLFieldSetElement>("controls");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (form.dataset.busy) return;
    form.dataset.busy = "true";
    controls.setAttribute("aria-busy", "true");
    show(null);
    try {
      await task();
    } catch (error) {
      say("Stopped by an error");
      show(error);
    } finally {
      delete form.dataset.busy;
      controls.removeAttribute("aria-busy");
    }
  });
}
