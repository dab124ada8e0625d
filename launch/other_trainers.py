"""What users of other trainers (transformers' Trainer and TRL, DeepSpeed, torchrun, MaxText) call what a configuration
of `launch.train` has, and what to write instead."""

_HOSTS = (
    "one process has all GPUs of its host; several find each other under srun, mpirun or Kubernetes, or by "
    "--coordinator_address, --num_processes and --process_id"
)
_ZERO = "ZeRO is --config.rules=zero1, zero2 or zero3, and its offload --config.offload.optimizer=true"
_BATCH = (
    "--config.train.global_batch counts the rows of a step over all devices, and --config.train.accumulation cuts it"
)
_RESUME = "the same command again goes on with what is in --config.run_dir"
_MESH = "it is --config.mesh.{}=N"
OTHER_TRAINERS = {
    **dict.fromkeys(("deepspeed", "deepspeed_config", "zero_stage", "zero"), _ZERO),
    **dict.fromkeys(("local_rank", "nproc_per_node", "nnodes", "node_rank", "master_addr", "num_gpus"), _HOSTS),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size", "per_device_batch_size", "micro_batch_size"), _BATCH),
    **dict.fromkeys(("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"), _BATCH),
    **dict.fromkeys(("resume_from_checkpoint", "resume", "load_full_state_path"), _RESUME),
    **dict.fromkeys(("tensor_parallel_size", "tp", "ici_tensor_parallelism"), _MESH.format("tensor")),
    **dict.fromkeys(("pipeline_parallel_size", "pp", "ici_pipeline_parallelism"), _MESH.format("pipeline")),
    **dict.fromkeys(("context_parallel_size", "cp", "ici_context_parallelism"), _MESH.format("context")),
    **dict.fromkeys(("expert_parallel_size", "ep", "ici_expert_parallelism"), _MESH.format("expert")),
    **dict.fromkeys(("ici_fsdp_parallelism", "dcn_fsdp_parallelism"), _MESH.format("fsdp")),
    **dict.fromkeys(("ici_data_parallelism", "dcn_data_parallelism"), _MESH.format("data")),
    **dict.fromkeys(("output_dir", "base_output_directory", "run_name", "save"), "it is --config.run_dir=FOLDER"),
    **dict.fromkeys(("bf16", "fp16"), "it is --config.precision=bf16 or fp16"),
    **dict.fromkeys(("max_steps", "train_iters"), "it is --config.train.steps=N"),
    **dict.fromkeys(("num_train_epochs", "epochs"), "--config.train.steps=N; a run says how many epochs these are"),
    **dict.fromkeys(("save_steps", "save_interval", "checkpoint_period"), "it is --config.checkpoint.every_steps=N"),
    "save_total_limit": "it is --config.checkpoint.keep=N",
    **dict.fromkeys(("max_seq_length", "max_length", "max_target_length"), "it is --config.train.seq_len=N"),
    **dict.fromkeys(("logging_steps", "log_interval", "log_period"), "it is --config.train.log_every=N"),
    **dict.fromkeys(("eval_steps", "eval_interval"), "it is --config.train.eval_every=N"),
    **dict.fromkeys(("gradient_checkpointing", "remat_policy"), "it is --config.remat=full, dots, names or offload"),
    **dict.fromkeys(("lr", "warmup_ratio"), "it is --config.optim.learning_rate=X, and optim.warmup_steps=N"),
    **dict.fromkeys(("lr_scheduler_type", "lr_decay_style"), "it is --config.optim.schedule=cosine, linear, ..."),
    **dict.fromkeys(
        ("optim", "mu_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
        "it is --config.optim.name=adamw, lion, ..., and optim.moments=int8 or bfloat16 for its state in fewer bits",
    ),
    "max_grad_norm": "it is --config.optim.clip_norm=X",
    **dict.fromkeys(("dataset_name", "dataset_path", "train_file"), "it is --config.data.train=FILES"),
    **dict.fromkeys(
        ("data_path", "dataset_mixer", "mixture_weights", "interleave_probs"),
        "they are --config.data.train=A,B and --config.data.weights=0.7,0.3",
    ),
    **dict.fromkeys(("lora_r", "lora_rank"), "it is --config.lora.rank=N, as in configs/lora.py"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "it is --config.lora.base=int4 or int8, as in configs/lora.py"),
    **dict.fromkeys(
        ("model_name_or_path", "model_name", "load_parameters_path"),
        'the configuration has model=Pretrained("FOLDER"), as configs/sft.py; then it is --config.model.folder=FOLDER',
    ),
    **dict.fromkeys(
        ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_vit", "freeze_aligner"),
        "it is --config.train.encoder=frozen, projector or all, and optim.encoder_rate a factor on its learning rate",
    ),
    **dict.fromkeys(
        ("report_to", "wandb_project", "use_wandb", "enable_wandb"),
        "metrics.jsonl and tensorboard/ are in --config.run_dir in any case; --config.trackers=wandb, mlflow or "
        "trackio sends them there too",
    ),
    **dict.fromkeys(
        ("loss_type", "pref_loss"), "it is --config.preference.loss=sigmoid, ipo, hinge, simpo, orpo or kto"
    ),
    **dict.fromkeys(
        ("simpo_gamma", "simpo_gamma_beta_ratio"), "it is --config.preference.gamma=X, not divided by beta"
    ),
}
