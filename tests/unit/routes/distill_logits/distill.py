import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from data import TextDataset, collate

student = AutoModelForCausalLM.from_pretrained("models/student").cuda()
teacher = AutoModelForCausalLM.from_pretrained("models/big", torch_dtype=torch.bfloat16).cuda().eval()
tok = AutoTokenizer.from_pretrained("models/student")
loader = DataLoader(TextDataset("data/train.jsonl", tok), batch_size=8, shuffle=True, collate_fn=collate)
opt = torch.optim.AdamW(student.parameters(), lr=1e-5, weight_decay=0.01)
sched = get_cosine_schedule_with_warmup(opt, 20, 1000)
T = 2.0
for step, batch in enumerate(loader):
    batch = {k: v.cuda() for k, v in batch.items()}
    with torch.no_grad():
        t_logits = teacher(**batch).logits
    s_out = student(**batch, labels=batch["input_ids"])
    kd = F.kl_div(F.log_softmax(s_out.logits / T, -1), F.softmax(t_logits / T, -1), reduction="batchmean") * T * T
    loss = 0.7 * kd + 0.3 * s_out.loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    opt.step()
    sched.step()
    opt.zero_grad()
student.save_pretrained("output/distilled")
