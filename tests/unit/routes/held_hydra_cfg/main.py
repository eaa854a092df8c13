import hydra
from omegaconf import DictConfig
from datasets import load_dataset
import trl


def make(cfg, ds):
    kinds = {
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "sft": (trl.SFTTrainer, trl.SFTConfig),
    }
    trainer_cls, config_cls = kinds[cfg.algo.name]
    return trainer_cls(model=cfg.model, args=config_cls(**cfg.algo.args), train_dataset=ds)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig):
    ds = load_dataset("json", data_files=cfg.data, split="train")
    trainer = make(cfg, ds)
    trainer.train()
    trainer.save_model(cfg.algo.args.output_dir)


if __name__ == "__main__":
    main()
