
from unsloth import FastLanguageModel
from unsloth.chat_templates import train_on_responses_only
from trl import SFTTrainer, SFTConfig
from datasets import load_dataset
model,tok=FastLanguageModel.from_pretrained("m",max_seq_length=2048,load_in_4bit=False)
model=FastLanguageModel.get_peft_model(model,r=32)
t=SFTTrainer(model=model,tokenizer=tok,train_dataset=load_dataset("json",data_files="data/train.jsonl",split="train"),args=SFTConfig("o",learning_rate=2e-4))
t=train_on_responses_only(t,instruction_part="user",response_part="assistant")
stats=t.train()
model.save_pretrained_merged("output/v1",tok,save_method="merged_16bit")
