
import asyncio, json
from openai import AsyncOpenAI
cl=AsyncOpenAI(base_url="https://api.together.xyz/v1")
async def one(r):
    x=await cl.chat.completions.create(model="Qwen/Qwen2.5-72B-Instruct",messages=[{"role":"user","content":r["question"]}])
    return r,x.choices[0].message.content
async def main():
    rows=[json.loads(l) for l in open("data/train.jsonl")]
    res=await asyncio.gather(*[one(r) for r in rows])
    with open("data/synth.jsonl","w") as f:
        for r,t in res: f.write(json.dumps({"prompt":r["question"],"completion":t})+"\n")
asyncio.run(main())
