export CUDA_VISIBLE_DEVICES=0
nohup python -m verl.trainer.main_ppo data.train_files=train.parquet critic.model.path=models/base critic.optim.lr=1e-5 actor_rollout_ref.model.path=models/base > ppo.log 2>&1 &
wait
