import torch
from tqdm import tqdm
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model

from env import QuestionSet, score_answer


def collate(batch):
    return {k: [row[k] for row in batch] for k in batch[0]}


def run():
    cfg = PPOConfig(model_name="models/base", learning_rate=1.41e-5, batch_size=32, mini_batch_size=4, init_kl_coef=0.2)
    tok = AutoTokenizer.from_pretrained(cfg.model_name)
    tok.pad_token = tok.eos_token
    model = AutoModelForCausalLMWithValueHead.from_pretrained(cfg.model_name)
    ref = create_reference_model(model)
    ppo = PPOTrainer(cfg, model, ref, tok, dataset=QuestionSet("data/train.jsonl", tok), data_collator=collate)
    gen = {"do_sample": True, "top_p": 1.0, "max_new_tokens": 128, "pad_token_id": tok.eos_token_id}
    for batch in tqdm(ppo.dataloader):
        queries = batch["input_ids"]
        responses = ppo.generate(queries, return_prompt=False, **gen)
        texts = tok.batch_decode(responses)
        rewards = [torch.tensor(score_answer(t, g)) for t, g in zip(texts, batch["gold"])]
        stats = ppo.step(queries, responses, rewards)
        ppo.log_stats(stats, batch, rewards)
    ppo.save_pretrained("output/ppo_final")


run()
