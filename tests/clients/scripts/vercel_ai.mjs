// Vercel's AI SDK: a batch of texts, its status, its results as a stream, and the list.
import { createOpenAI } from "@ai-sdk/openai";
import {
  experimental_getBatchResults as getBatchResults,
  experimental_getBatchStatus as getBatchStatus,
  experimental_listBatches as listBatches,
  experimental_startBatch as startBatch,
} from "ai";

const provider = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL });
const started = await startBatch({
  provider,
  requests: Array.from({ length: 8 }, (_, number) => ({
    id: `c${number}`,
    type: "text",
    model: "m",
    prompt: `Say ${number}.`,
  })),
});
const batch = { version: started.version, id: started.id, provider: started.provider };
let status = started;
while (!["completed", "failed", "expired", "cancelled"].includes(status.status)) {
  await new Promise((resolve) => setTimeout(resolve, 300));
  status = await getBatchStatus({ provider, batch });
}
const results = [];
for await (const one of getBatchResults({ provider, batch })) results.push(one);
if (results.length !== 8 || results.some((one) => one.status !== "succeeded" || !one.text)) throw new Error(JSON.stringify(results));
const listed = await listBatches({ provider, limit: 5 });
if (!listed.batches.some((one) => one.id === batch.id)) throw new Error(`the list showed ${JSON.stringify(listed)}`);
console.log(`startBatch, getBatchStatus, getBatchResults (${results.length} texts), listBatches`);
