/** The page of sentence search: embeddings of sentences, the nearest to a question first. */

import { type Opened, element, onSubmit, open, say } from "./page.js";
import { ModelError, tensor } from "./relax-tune.js";

const IDS = "input_ids";
const MASK = "attention_mask";
const MOST_ROWS = 8;

/** Embed texts, in batches of as many rows as the model takes, each padded to its longest text. */
async function embed({ model, codec }: Opened, texts: readonly string[], progress: (done: number) => void): Promise<Float32Array[]> {
  const executor = model.executor("main");
  const longest = executor.bounds(IDS, 1)[1];
  const rows = Math.min(executor.bounds(IDS, 0)[1], MOST_ROWS);
  const names = executor.program.inputs.map((index) => executor.program.buffers[index].name);
  const found: Float32Array[] = [];
  for (let at = 0; at < texts.length; at += rows) {
    const batch = texts.slice(at, at + rows).map((text) => whole(text, codec.encode(text), longest));
    const width = Math.max(1, ...batch.map((tokens) => tokens.length));
    const inputs = Object.fromEntries(
      names.map((name) => {
        const numbers = batch.flatMap((tokens) =>
          Array.from({ length: width }, (_, k) => {
            if (name === IDS) return tokens[k] ?? 0;
            return name === MASK && k < tokens.length ? 1 : 0;
          }),
        );
        return [name, tensor("int64", [batch.length, width], numbers)];
      }),
    );
    const [first] = await model.run("main", inputs);
    const size = first.data.length / batch.length;
    for (let row = 0; row < batch.length; row++) {
      found.push((first.data as Float32Array).slice(row * size, (row + 1) * size));
    }
    progress(found.length);
  }
  return found;
}

/** Return the tokens of a text. One that is too long is refused: a part of it would stand for the whole. */
function whole(text: string, tokens: readonly number[], longest: number): readonly number[] {
  if (tokens.length <= longest) return tokens;
  const shown = text.length <= 60 ? text : `${text.slice(0, 57)}...`;
  throw new ModelError(`Expected at most ${longest} tokens, got ${tokens.length} in "${shown}". Shorten it, or build with a larger bound.`);
}

function cosine(a: Float32Array, b: Float32Array): number {
  let product = 0;
  let first = 0;
  let second = 0;
  for (let k = 0; k < a.length; k++) {
    product += a[k] * b[k];
    first += a[k] * a[k];
    second += b[k] * b[k];
  }
  return product / Math.max(Math.sqrt(first * second), 1e-30);
}

function showResults(scored: readonly { text: string; score: number }[]): void {
  const items = scored.map(({ text, score }) => {
    const item = document.createElement("li");
    const number = document.createElement("strong");
    number.textContent = score.toFixed(4);
    item.append(number, " ", text);
    return item;
  });
  element("results").replaceChildren(...items);
}

const known = new Map<string, Float32Array>();

async function search(opened: Opened): Promise<void> {
  const query = element<HTMLInputElement>("query").value.trim();
  const lines = element<HTMLTextAreaElement>("sentences").value.split("\n");
  const texts = lines.map((line) => line.trim()).filter(Boolean);
  if (!query || !texts.length) throw new ModelError("Write a question and at least one sentence.");
  const fresh = [...new Set([query, ...texts])].filter((text) => !known.has(text));
  const found = await embed(opened, fresh, (done) => say(`Embedded ${done} of ${fresh.length} sentences`));
  fresh.forEach((text, at) => known.set(text, found[at]));
  const wanted = known.get(query) as Float32Array;
  const scored = texts.map((text) => ({ text, score: cosine(wanted, known.get(text) as Float32Array) }));
  scored.sort((a, b) => b.score - a.score);
  showResults(scored);
  say(`${scored.length} sentences, nearest first`);
}

void open((opened) => onSubmit(element<HTMLFormElement>("form"), () => search(opened)));
