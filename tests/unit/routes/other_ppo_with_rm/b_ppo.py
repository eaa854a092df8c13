
from trl.experimental.ppo import PPOTrainer, PPOConfig
from transformers import AutoModelForSequenceClassification as S, AutoModelForCausalLM as L, AutoTokenizer as T
rm=S.from_pretrained("rm",num_labels=1); v=S.from_pretrained("rm",num_labels=1)
tr=PPOTrainer(args=PPOConfig("o"),processing_class=T.from_pretrained("m"),model=L.from_pretrained("m"),ref_model=L.from_pretrained("m"),reward_model=rm,value_model=v,train_dataset=None)
tr.train(); tr.save_model("output/v1")
