accelerate launch -m axolotl.cli.train dpo.yml
