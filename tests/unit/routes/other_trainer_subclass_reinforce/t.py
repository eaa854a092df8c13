
from transformers import Trainer, TrainingArguments
import torch
class PG(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kw):
        rewards=inputs.pop("rewards"); out=model(**{k:v for k,v in inputs.items() if k!="labels"}); lab=inputs["labels"][:,1:]
        lp=torch.gather(out.logits[:,:-1].log_softmax(-1),2,lab.clamp(min=0).unsqueeze(-1)).squeeze(-1)*(lab!=-100)
        loss=-(rewards*lp.sum(1)).mean()
        return (loss,out) if return_outputs else loss
def main():
    from data import ds
    PG("m",TrainingArguments("o",remove_unused_columns=False),train_dataset=ds).train()
if __name__=="__main__": main()
