// Builds ../static/*.js from src/*.ts. Each file begins with the hash of all sources, by which a test knows that it is current.

import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const sources = readdirSync(join(here, "src"))
  .filter((name) => name.endsWith(".ts"))
  .map((name) => `src/${name}`);
const hash = createHash("sha256");
for (const name of ["build.mjs", "package-lock.json", "package.json", "tsconfig.json", ...sources].sort()) {
  hash.update(`${name}\0`);
  hash.update(readFileSync(join(here, name)));
}
const of = `// Built from tuner/web/browser by \`make web\`; sources sha256:${hash.digest("hex")}`;
const licences =
  "// Contains @huggingface/tokenizers (Apache-2.0, Hugging Face) and @noble/hashes (MIT, (c) 2022 Paul Miller, https://paulmillr.com).";

await build({
  absWorkingDir: here,
  entryPoints: ["src/relax-tune.ts", "src/wasm_worker.ts"],
  outdir: "../static",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  banner: { js: `${of}\n${licences}` },
});
await build({
  absWorkingDir: here,
  entryPoints: ["src/search.ts", "src/generate.ts"],
  outdir: "../static",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  external: ["./relax-tune.js"],
  banner: { js: of },
});
await build({
  absWorkingDir: here,
  entryPoints: ["src/measure.ts"],
  outdir: "../static",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  banner: { js: of },
});
