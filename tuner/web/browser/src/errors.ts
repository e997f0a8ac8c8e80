/** An error whose message a page shows unchanged. */
export class ModelError extends Error {
  override name = "ModelError";
}

/** Return the words of anything that was thrown. */
export function inWords(error: unknown): string {
  if (error instanceof ModelError) return error.message;
  return error instanceof Error ? `${error.name}: ${error.message}` : String(error);
}
