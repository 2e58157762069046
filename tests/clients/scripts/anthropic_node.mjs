// Anthropic's SDK for Node: message batches, their results as an iterator, and auto-paging lists.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ maxRetries: 8 });
const made = await client.messages.batches.create({
  requests: Array.from({ length: 6 }, (_, number) => ({
    custom_id: `c${number}`,
    params: { model: "m", max_tokens: 20, messages: [{ role: "user", content: `Say ${number}.` }] },
  })),
});
let batch = made;
while (batch.processing_status !== "ended") {
  await new Promise((resolve) => setTimeout(resolve, 300));
  batch = await client.messages.batches.retrieve(made.id);
}
const results = [];
for await (const one of await client.messages.batches.results(made.id)) results.push(one);
if (results.length !== 6 || results.some((one) => one.result.type !== "succeeded")) throw new Error(JSON.stringify(results));
const seen = [];
for await (const one of client.messages.batches.list({ limit: 1 })) seen.push(one.id);
if (!seen.includes(made.id)) throw new Error(`paging showed ${seen}`);
console.log(`messages.batches create, retrieve, results (${results.length} succeeded), list`);
