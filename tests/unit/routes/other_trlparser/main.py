
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from rewards import REWARDS
from datasets import load_dataset
def main(sa,ta,ma):
    ds=load_dataset(sa.dataset_name)
    tr=GRPOTrainer(model=ma.model_name_or_path,reward_funcs=list(REWARDS.values()),args=ta,train_dataset=ds["train"],peft_config=get_peft_config(ma))
    tr.train(resume_from_checkpoint=None); tr.save_model(ta.output_dir)
if __name__=="__main__":
    main(*TrlParser((ScriptArguments,GRPOConfig,ModelConfig)).parse_args_and_config())
