// OpenAI's SDK for Node: upload, batch, auto-paging lists, content, and an upload in parts.
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ maxRetries: 8 });
const line = (number) =>
  JSON.stringify({
    custom_id: `c${number}`,
    method: "POST",
    url: "/v1/chat/completions",
    body: { model: "m", messages: [{ role: "user", content: `Say ${number}.` }] },
  }) + "\n";
const text = Array.from({ length: 12 }, (_, number) => line(number)).join("");
const ended = async (id) => {
  for (;;) {
    const batch = await client.batches.retrieve(id);
    if (["completed", "failed", "expired", "cancelled"].includes(batch.status)) return batch;
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
};
const wanted = { endpoint: "/v1/chat/completions", completion_window: "24h" };
const file = await client.files.create({ file: await toFile(Buffer.from(text), "in.jsonl"), purpose: "batch" });
const batch = await ended((await client.batches.create({ input_file_id: file.id, ...wanted })).id);
const answers = (await (await client.files.content(batch.output_file_id)).text()).trim().split("\n").map(JSON.parse);
if (batch.status !== "completed" || answers.length !== 12) throw new Error(JSON.stringify(batch));
const half = Math.floor(text.length / 2);
const upload = await client.uploads.create({
  bytes: text.length,
  filename: "in.jsonl",
  mime_type: "application/jsonl",
  purpose: "batch",
});
const parts = await Promise.all(
  [text.slice(0, half), text.slice(half)].map(async (piece) =>
    client.uploads.parts.create(upload.id, { data: await toFile(Buffer.from(piece), "part") }),
  ),
);
const whole = await client.uploads.complete(upload.id, { part_ids: parts.map((part) => part.id) });
const other = await ended((await client.batches.create({ input_file_id: whole.file.id, ...wanted })).id);
const seen = [];
for await (const one of client.batches.list({ limit: 1 })) seen.push(one.id);
const isWhole = seen.includes(batch.id) && seen.includes(other.id) && new Set(seen).size === seen.length;
if (!isWhole) throw new Error(`paging showed ${seen}`);
console.log(`files, batches (${answers.length} answers), uploads in parts, batches.list in pages of one`);
