// Sends requests to the server; answers are JSON or server-sent events.

// An error response, or with status 0 a stream that has failed.
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let key = sessionStorage.getItem("foreword-key") ?? "";

export function useKey(given) {
  key = given;
  sessionStorage.setItem("foreword-key", given);
}

async function call(path, options) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Refusal(answer.status, body?.error?.message ?? `the server answered ${answer.status}`);
}

export async function get(path) {
  return (await call(path, {})).json();
}

// Yield the events of a stream; skip comments, with which servers may pad it.
export async function* stream(path, body, signal) {
  const answer = await call(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Refusal(0, "the connection ended before the answer did");
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const event of blocks.flatMap(dataOf)) {
        if (event === "[DONE]") return;
        const value = JSON.parse(event);
        if (value.error) throw new Refusal(0, value.error.message);
        yield value;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(block) {
  return block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
}
