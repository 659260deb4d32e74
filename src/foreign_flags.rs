//! Flags that users of other trainers type, and what mcc has instead: Megatron-LM, DeepSpeed, torchtitan, NeMo,
//! torchrun and Hugging Face's `Trainer`.
//!
//! Names that mcc takes itself, on any of its commands, are not here: `usage` finds those in the command line's own
//! description.

/// What mcc has instead of a foreign flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagReplacement {
    /// A flag of this command of mcc, with its leading dashes.
    Flag(&'static str, &'static str),
    /// A setting of the model text, under the name that the texts in `models/` have for it.
    Setting(&'static str),
    /// What the model text itself says, in whole.
    Text(&'static str),
    /// Nothing to ask for: mcc does so always.
    Always(&'static str),
    /// Nothing, for this reason, or in another way.
    Nothing(&'static str),
}

use FlagReplacement::{Always, Flag, Nothing, Setting, Text};

/// Foreign names, in lower case, without leading dashes and with dashes for underscores.
pub const FOREIGN: &[(&[&str], FlagReplacement)] = &[
    // These are sizes of the model.
    (&["num-layers", "encoder-num-layers", "n-layer", "n-layers", "num-hidden-layers"], Setting("layers")),
    (&["decoder-num-layers"], Setting("decoder_layers")),
    (&["hidden-size", "encoder-hidden-size", "n-embd", "d-model", "dim"], Setting("hidden")),
    (&["num-attention-heads", "n-head", "n-heads", "num-heads"], Setting("heads")),
    (&["num-query-groups", "group-query-attention", "num-key-value-heads", "n-kv-heads"], Setting("kv_heads")),
    (&["kv-channels"], Setting("head_dim")),
    (&["ffn-hidden-size", "intermediate-size"], Setting("ffn")),
    (
        &["seq-length", "seq-len", "sequence-length", "encoder-seq-length", "block-size", "max-seq-len", "max-seq-length", "max-sequence-length"],
        Setting("seq"),
    ),
    (&["decoder-seq-length"], Setting("target")),
    (&["max-position-embeddings", "n-positions"], Setting("seq")),
    (&["vocab-size", "padded-vocab-size"], Setting("vocab")),
    (&["norm-epsilon", "layernorm-epsilon", "layer-norm-epsilon", "norm-eps", "rms-norm-eps"], Setting("norm_eps")),
    (&["hidden-dropout", "dropout"], Setting("dropout_rate")),
    (&["attention-dropout"], Setting("attention_dropout")),
    (&["rotary-base", "rope-theta"], Setting("rope_theta")),
    (&["rotary-percent", "partial-rotary-factor"], Setting("rotary_factor")),
    (&["rope-scaling-factor", "rotary-scaling-factor"], Setting("rope_factor")),
    (&["num-experts", "num-moe-experts", "num-local-experts"], Setting("experts")),
    (&["mtp-num-layers"], Setting("mtp")),
    (&["mtp-loss-scaling-factor"], Setting("mtp_weight")),
    (&["moe-router-topk", "num-experts-per-tok"], Setting("top_k")),
    (&["moe-ffn-hidden-size", "moe-intermediate-size"], Setting("expert_ffn")),
    (&["moe-shared-expert-intermediate-size"], Setting("shared_ffn")),
    (&["moe-aux-loss-coeff", "router-aux-loss-coef"], Setting("aux_coef")),
    (&["moe-router-num-groups"], Setting("groups")),
    (&["moe-router-group-topk"], Setting("top_groups")),
    (&["moe-router-topk-scaling-factor"], Setting("route_scale")),
    (&["moe-router-bias-update-rate"], Setting("bias_rate")),
    (&["q-lora-rank"], Setting("q_rank")),
    (&["kv-lora-rank"], Setting("kv_rank")),
    (&["qk-head-dim"], Setting("nope")),
    (&["qk-pos-emb-head-dim"], Setting("turned")),
    (&["v-head-dim"], Setting("v_dim")),
    (&["use-rope-scaling"], Setting("rope_factor")),
    (&["relative-attention-num-buckets"], Setting("buckets")),
    (&["relative-attention-max-distance"], Setting("max_distance")),
    (&["moe-router-enable-expert-bias"], Setting("bias_rate")),
    (&["window-size", "sliding-window"], Setting("window")),
    (&["window-attn-skip-freq"], Setting("window_every")),
    (&["add-qkv-bias"], Setting("qkv_bias")),
    (&["qk-layernorm"], Setting("qk_norm")),
    (&["patch-dim", "patch-size"], Setting("patch")),
    (&["num-classes"], Setting("classes")),
    // These choose the model's architecture.
    (
        &[
            "normalization",
            "swiglu",
            "squared-relu",
            "quick-geglu",
            "openai-gelu",
            "onnx-safe",
            "activation-func",
            "disable-bias-linear",
            "position-embedding-type",
            "use-rotary-position-embeddings",
            "use-rope",
            "rotary-interleaved",
            "apply-layernorm-1p",
            "apply-residual-connection-post-layernorm",
            "multi-latent-attention",
            "attention-softmax-in-fp32",
            "apply-query-key-layer-scaling",
            "moe-layer-freq",
            "moe-router-load-balancing-type",
            "moe-router-score-function",
            "moe-router-dtype",
            "moe-z-loss-coeff",
            "no-position-embedding",
            "rope-type",
            "mscale",
            "mscale-all-dim",
            "softmax-type",
            "glu-linear-offset",
            "activation-func-clamp-value",
            "enable-gpt-oss",
            "moe-router-pre-softmax",
            "hybrid-layer-pattern",
            "hybrid-override-pattern",
            "model-type",
            "model.name",
        ],
        Text("choose or write one: models/ has GPT-2, Llama, Mixtral, DeepSeek-V3, BERT, T5 and others"),
    ),
    (&["untie-embeddings-and-output-weights", "tie-word-embeddings"], Setting("tied")),
    (&["init-method-std", "init-method-xavier-uniform"], Text("`param w: [..] ~ normal(0.02);`")),
    (&["model.flavor", "flavor"], Text("sizes are its settings: `-D layers=32 -D hidden=4096`")),
    (
        &["model-name-or-path", "hf-assets-path", "use-checkpoint-args"],
        Nothing("`mcc import hf DIRECTORY -o OUT` makes a model text and weights of a checkpoint"),
    ),
    // These set the mesh.
    (&["tensor-parallel-size", "tensor-parallel-degree", "tp-size", "model-parallel-size"], Flag("compile", "--tp")),
    (&["pipeline-parallel-size", "pipeline-parallel-degree", "pp-size"], Flag("compile", "--pp")),
    (&["data-parallel-size", "dp-size", "ddp"], Flag("compile", "--dp")),
    (&["context-parallel-degree", "sequence-parallel-size", "cp-size"], Flag("compile", "--cp")),
    (&["expert-parallel-size", "expert-parallel-degree", "ep-size"], Flag("compile", "--ep")),
    (&["expert-tensor-parallel-degree"], Flag("compile", "--etp")),
    (&["ulysses-sequence-parallel", "ulysses-degree", "hierarchical-context-parallel-sizes"], Flag("compile", "--cp-comm-type")),
    (
        &["virtual-pipeline-model-parallel-size", "num-layers-per-virtual-pipeline-stage", "pipeline-parallel-layers-per-stage"],
        Flag("compile", "--vpp"),
    ),
    (&["pipeline-model-parallel-layout"], Flag("compile", "--pipeline-layout")),
    (
        &["decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "pipeline-model-parallel-split-rank"],
        Flag("compile", "--pipeline-layers"),
    ),
    (&["standalone-embedding-stage"], Flag("compile", "--pipeline-layout")),
    (&["pipeline-parallel-schedule"], Flag("compile", "--pipeline-schedule")),
    (&["use-tp-pp-dp-mapping"], Nothing("ranks count with tp fastest, then cp, dp and pp")),
    // These share out memory over data-parallel ranks.
    (&["zero-stage", "zero-optimization", "data-parallel-sharding-strategy"], Flag("compile", "--zero")),
    (
        &["fsdp", "use-torch-fsdp2", "use-custom-fsdp", "use-megatron-fsdp", "data-parallel-shard-degree", "fully-sharded-data-parallel"],
        Flag("compile", "--zero"),
    ),
    (
        &["cpu-offload", "offload-optimizer", "offload-optimizer-device", "optimizer-offload-fraction", "overlap-cpu-optimizer-d2h-h2d"],
        Flag("compile", "--optimizer-offload"),
    ),
    (&["offload-param", "offload-param-device", "enable-cpu-offload", "fsdp-offload-params"], Flag("compile", "--param-offload")),
    (&["nvme-path", "offload-optimizer-nvme-path", "offload-param-nvme-path", "nvme-swap-folder"], Flag("run", "--offload-to")),
    (&["ddp-bucket-size", "reduce-bucket-size", "allgather-bucket-size"], Flag("compile", "--bucket-size")),
    (
        &["overlap-grad-reduce", "overlap-param-gather", "overlap-comm", "overlap-p2p-communication"],
        Always("communication runs beside compute, unless `mcc compile --overlap off` is asked for"),
    ),
    (&["no-overlap-p2p-communication", "no-async-tensor-model-parallel-allreduce"], Flag("compile", "--overlap")),
    (&["tp-comm-overlap-cfg", "tp-comm-bootstrap-backend"], Flag("compile", "--tp-comm-overlap")),
    (&["enable-async-tensor-parallel"], Flag("compile", "--tp-comm-overlap")),
    (&["accumulate-allreduce-grads-in-fp32", "grad-reduce-in-fp32"], Always("gradients of weights are summed in f32")),
    (&["grad-reduce-in-bf16", "megatron-fsdp-grad-comm-dtype", "megatron-fsdp-main-grads-dtype"], Nothing("gradients of weights are summed in f32")),
    (
        &["fsdp-double-buffer", "fsdp-manual-registration", "use-nccl-ub", "init-model-with-meta-device"],
        Nothing("memory is planned when a job is compiled"),
    ),
    (&["ddp-impl"], Nothing("`--zero` says what data-parallel ranks share out")),
    (&["delay-wgrad-compute", "defer-embedding-wgrad-compute"], Nothing("`--pipeline-schedule zb-h1` delays gradients of weights")),
    // These set batches.
    (&["train-micro-batch-size-per-gpu", "per-device-train-batch-size", "local-batch-size", "batch-size"], Flag("compile", "--micro-batch-size")),
    (&["calculate-per-token-loss"], Always("a mean runs over the whole global batch, however it is cut")),
    (&["train-batch-size", "gradient-accumulation-steps", "accumulate-grad-batches", "num-micro-batches"], Flag("compile", "--global-batch-size")),
    (
        &["rampup-batch-size", "step-batch-size-schedule"],
        Nothing("a compiled step has one batch size: compile each, and go on with `--load DIR --allow-changed batch`"),
    ),
    // These save memory.
    (
        &[
            "recompute-activations",
            "checkpoint-activations",
            "gradient-checkpointing",
            "activation-checkpoint-method",
            "activation-checkpointing",
            "activation-checkpoint.mode",
            "activations-checkpoint-granularity",
        ],
        Flag("compile", "--recompute"),
    ),
    (&["activations-checkpoint-method"], Flag("compile", "--recompute-method")),
    (&["activations-checkpoint-num-layers"], Flag("compile", "--recompute-num-layers")),
    (
        &["fine-grained-activation-offloading", "offload-modules", "cpu-offloading", "enable-activation-offloading"],
        Flag("compile", "--activation-offload"),
    ),
    (&["distribute-saved-activations"], Flag("compile", "--sp")),
    (
        &["empty-unused-memory-level", "memory-efficient-linear"],
        Always("memory is planned when a job is compiled, and nothing is allocated in a step"),
    ),
    // These set the precision.
    (&["precision", "mixed-precision", "torch-dtype", "mixed-precision-param", "params-dtype"], Flag("compile", "--dtype")),
    (&["disable-bf16-reduced-precision-matmul"], Always("sums of products are f32")),
    (&["allow-tf32", "enable-tf32", "tf32-mode"], Flag("compile", "--tf32")),
    (
        &[
            "fp8-amax-history-len",
            "fp8-amax-compute-algo",
            "fp8-margin",
            "fp8-interval",
            "fp8-format",
            "fp8",
            "fp8-hybrid",
            "fp8-recipe",
            "fp8-param-gather",
            "fp4",
            "fp4-format",
            "enable-fp8-linear",
            "quantization",
        ],
        Nothing("types of values are f32, bf16 and fp16: `--dtype`"),
    ),
    // These choose kernels.
    (&["use-flash-attn", "attention-backend", "flash-attention", "attn-implementation"], Always("attention is one kernel that keeps no scores")),
    (
        &[
            "no-masked-softmax-fusion",
            "no-bias-gelu-fusion",
            "no-bias-swiglu-fusion",
            "no-bias-dropout-fusion",
            "bias-gelu-fusion",
            "no-rope-fusion",
            "apply-rope-fusion",
            "no-gradient-accumulation-fusion",
            "gradient-accumulation-fusion",
            "no-persist-layer-norm",
            "cross-entropy-loss-fusion",
            "cross-entropy-fusion-impl",
            "moe-permute-fusion",
            "moe-grouped-gemm",
            "use-fused-rmsnorm",
            "fused-adam",
        ],
        Always("mcc decides what it fuses; results do not depend on it"),
    ),
    (
        &[
            "use-te",
            "export-force-local-attention",
            "transformer-impl",
            "use-mcore-models",
            "use-legacy-models",
            "spec",
            "torch-compile",
            "training.compile",
            "compile.enable",
            "jit-fuser",
        ],
        Nothing("every kernel is compiled from the model text"),
    ),
    (&["cuda-graph", "enable-cuda-graph", "external-cuda-graph", "cuda-graph-scope"], Always("steps on GPUs are CUDA graphs")),
    (
        &["cuda-device-max-connections", "use-cpu-initialization", "perform-initialization", "no-initialization"],
        Always("no setting of the machine counts"),
    ),
    (&["deterministic-mode", "deterministic"], Always("the same artifact, data and seed give the same bits")),
    // These concern experts.
    (&["moe-expert-capacity-factor", "moe-pad-expert-input-to-capacity"], Flag("compile", "--moe-buffer-factor")),
    (
        &["moe-token-dispatcher-type", "moe-enable-deepep", "moe-flex-dispatcher-backend"],
        Nothing("how rows travel to experts follows from `--ep`, `--etp` and `--sp`"),
    ),
    (&["moe-router-force-load-balancing"], Nothing("routers choose by their scores")),
    (&["moe-per-layer-logging"], Flag("run", "--verbose")),
    (&["moe-token-drop-policy"], Nothing("no token is dropped unless the model text says so")),
    // These set the optimizer.
    (&["learning-rate", "max-lr", "optimizer.lr"], Flag("compile", "--lr")),
    (&["end-lr", "min-learning-rate", "min-lr-factor"], Flag("compile", "--min-lr")),
    (&["lr-scheduler-type", "decay-type", "lr-scheduler"], Flag("compile", "--lr-decay-style")),
    (
        &["lr-warmup-fraction", "lr-warmup-samples", "lr-warmup-steps", "warmup", "warmup-steps", "warmup-iters", "warmup-num-steps", "warmup-ratio"],
        Flag("compile", "--lr-warmup-iters"),
    ),
    (&["lr-decay-samples", "lr-decay-steps", "total-num-steps"], Flag("compile", "--lr-decay-iters")),
    (&["lr-wsd-decay-samples"], Flag("compile", "--lr-wsd-decay-iters")),
    (&["constant-steps", "lr-constant-steps"], Flag("compile", "--lr-constant-iters")),
    (&["muon-use-nesterov"], Flag("compile", "--muon-nesterov")),
    (&["muon-ns-steps", "ns-steps"], Flag("compile", "--muon-num-ns-steps")),
    (&["muon-tp-mode"], Nothing("matrices that ranks split are orthogonalized as a whole")),
    (&["muon-fp32-matmul-prec"], Flag("compile", "--tf32")),
    (&["muon-no-split-qkv", "muon-split-qkv"], Nothing("each parameter of the text is a matrix of its own")),
    (&["lr-warmup-init"], Nothing("the rate warms up from 0")),
    (&["start-weight-decay", "end-weight-decay", "weight-decay-incr-style"], Flag("compile", "--weight-decay")),
    (&["decoupled-lr", "decoupled-min-lr", "head-lr-mult"], Text("`group \"wte\" { lr_scale: 0.5; }` in its `train` section")),
    (
        &["override-opt-param-scheduler", "use-checkpoint-opt-param-scheduler", "override-lr-scheduler"],
        Always("the artifact says the learning rate; `--allow-changed rate` goes on with another than the checkpoint's"),
    ),
    (&["gradient-clipping", "max-grad-norm", "max-norm", "gradient-clip-val"], Flag("compile", "--clip-grad")),
    (&["beta1", "adam-beta-1"], Flag("compile", "--adam-beta1")),
    (&["beta2", "adam-beta-2"], Flag("compile", "--adam-beta2")),
    (&["adam-epsilon", "eps", "optimizer-eps"], Flag("compile", "--adam-eps")),
    (&["momentum"], Flag("compile", "--sgd-momentum")),
    (&["use-precision-aware-optimizer", "main-grads-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"], Nothing("optimizer states are f32")),
    // These set steps and data.
    (&["train-samples", "max-steps", "num-train-epochs", "num-epochs", "max-epochs", "training.steps", "max-iters"], Flag("run", "--steps")),
    (&["train-data", "train-file"], Flag("run", "--data")),
    (&["dataset", "dataset-path", "dataset-name", "data-prefix", "data.paths", "dataset.blend", "dataset.data-path"], Flag("run", "--data-path")),
    (&["validation-file", "eval-file"], Flag("run", "--valid-data")),
    (&["validation.dataset", "validation.dataset-path"], Flag("run", "--valid-data-path")),
    (&["splits-string"], Flag("run", "--split")),
    (&["index-mapping-dir", "path-to-cache"], Flag("run", "--data-cache-path")),
    (&["mid-level-dataset-surplus"], Nothing("the surplus of a blend is Megatron-LM's default, 0.005")),
    (&["eval-global-batch-size", "eval-micro-batch-size"], Nothing("an evaluation has the batches of a step")),
    (&["fim-data", "fim-rate", "fim-spm-rate"], Nothing("samples are what data sets hold: let the text be rearranged before `mcc data tokenize`")),
    (&["eval-steps", "val-check-interval", "evaluation-strategy", "eval-strategy", "validation.freq"], Flag("run", "--eval-interval")),
    (&["limit-val-batches", "validation.steps"], Flag("run", "--eval-iters")),
    (
        &[
            "tokenizer-type",
            "tokenizer-model",
            "tokenizer-name-or-path",
            "tokenizer-name",
            "tokenizer-path",
            "vocab-file",
            "merge-file",
            "vocab-extra-ids",
            "legacy-tokenizer",
            "hf-tokenizer",
            "tiktoken-pattern",
            "tiktoken-num-special-tokens",
            "tiktoken-special-tokens",
            "tokenizer-prompt-format",
            "no-use-tokenizer-model-from-checkpoint-args",
        ],
        Nothing("`mcc data tokenize` makes data sets of tokens with a tokenizer, and `mcc run --data-path` reads them"),
    ),
    (
        &[
            "num-workers",
            "dataloader-type",
            "data-impl",
            "mmap-warmup",
            "no-mmap-bin-files",
            "dataloader-num-workers",
            "num-dataset-builder-threads",
            "per-dataset-sequences-path",
            "dataloader-fast-cache-load",
            "dataloader-defer-npy-index-mmap",
            "no-data-sharding",
            "no-create-attention-mask-in-dataloader",
        ],
        Nothing("each rank reads its own rows ahead of need, in place"),
    ),
    (&["reset-position-ids", "reset-attention-mask", "eod-mask-loss", "packed-sequence", "dataloader-inter-document-masking"], Setting("packed")),
    (&["sample-packing", "packing-strategy", "packed-sequence-size"], Flag("run", "--packing")),
    (&["completion-only-loss", "assistant-only-loss", "answer-only-loss", "train-on-inputs"], Flag("run", "--loss-mask")),
    (&["mock-data", "synthetic-data"], Nothing("`mcc run --data` takes any text")),
    // These concern checkpoints.
    (&["checkpoint.load", "restore-from-path", "resume-from-checkpoint", "resume-from"], Flag("run", "--load")),
    (&["resume-if-exists"], Flag("run", "--resume")),
    (&["pretrained-checkpoint", "finetune", "no-load-optim", "no-load-rng", "initial-load-path"], Flag("run", "--init")),
    (&["no-save-optim", "no-save-rng", "last-save-model-only"], Flag("run", "--save-weights")),
    (&["save-steps", "checkpoint.interval", "checkpoint-interval", "non-persistent-save-interval"], Flag("run", "--save-interval")),
    (&["save-retain-interval", "save-top-k", "save-total-limit", "checkpoint.keep-latest-k"], Flag("run", "--keep")),
    (&["output-dir", "default-root-dir", "dump-folder", "checkpoint-dir"], Flag("run", "--save")),
    (
        &[
            "use-dist-ckpt",
            "ckpt-format",
            "dist-ckpt-format",
            "async-save",
            "auto-detect-ckpt-format",
            "ckpt-fully-parallel-save",
            "dist-ckpt-strictness",
            "checkpoint.async-mode",
        ],
        Always("each rank writes its own part of a checkpoint, and any mesh reads it"),
    ),
    // These concern logs.
    (
        &[
            "tensorboard-log-interval",
            "tensorboard-queue-size",
            "log-learning-rate-to-tensorboard",
            "log-timers-to-tensorboard",
            "log-validation-ppl-to-tensorboard",
            "log-memory-to-tensorboard",
            "enable-tensorboard",
            "report-to",
            "logging-dir",
        ],
        Flag("run", "--tensorboard-dir"),
    ),
    (
        &["wandb-project", "wandb-exp-name", "wandb-save-dir", "wandb-entity", "log-throughput", "enable-wandb", "log-progress"],
        Flag("run", "--log-dir"),
    ),
    (&["log-params-norm", "log-num-zeros-in-grad"], Nothing("norms of parameters and zeros of gradients are not logged")),
    (&["log-straggler", "straggler-minmax-count", "disable-straggler-on-startup", "straggler-ctrlr-port"], Flag("run", "--straggler-interval")),
    (&["check-weight-hash-across-dp-replicas-interval"], Flag("run", "--check-replicas")),
    (
        &["timing-log-level", "timing-log-option", "use-pytorch-profiler", "profile-ranks", "enable-profiling", "wall-clock-breakdown"],
        Flag("run", "--profile"),
    ),
    (&["profile-step-start", "profile-step-end", "profile-freq"], Flag("run", "--profile-steps")),
    (&["check-for-nan-in-loss-and-grad", "no-check-for-nan-in-loss-and-grad", "check-for-large-grads", "rerun-mode"], Flag("run", "--on-nonfinite")),
    (&["logging-level"], Flag("run", "--verbose")),
    (&["enable-experimental"], Nothing("all that mcc has is on")),
    (&["exit-signal-handler", "exit-signal"], Always("SIGTERM and SIGINT finish the step and save")),
    (&["manual-gc", "manual-gc-interval", "gc-freq"], Nothing("there is no garbage collector")),
    // These belong to launchers.
    (
        &["nproc-per-node", "nnodes", "node-rank", "rdzv-backend", "rdzv-id", "max-restarts", "standalone", "no-python", "monitor-interval", "role"],
        Nothing("torchrun takes it, before `mcc run OUT.mcc`; alone, `mcc run` starts every rank of this machine"),
    ),
    (&["master-addr", "master-port", "rdzv-endpoint", "init-method", "hostfile", "dist-url"], Flag("run", "--rendezvous")),
    (&["distributed-timeout-minutes", "rdzv-timeout", "distributed-timeout-seconds", "timeout"], Flag("run", "--rendezvous-timeout")),
    (&["distributed-backend", "dist-backend", "backend", "nccl-communicator-config-path"], Flag("run", "--exchanges")),
    (&["local-rank", "local-world-size", "world-size", "rank"], Nothing("ranks follow from the artifact's mesh, or from the launcher")),
    (
        &["num-gpus", "gpus-per-node", "num-nodes", "devices", "num-processes", "include"],
        Nothing("how many ranks there are follows from the mesh that is compiled: `--dp`, `--cp`, `--tp`, `--pp`"),
    ),
    (&["accelerator", "use-cpu", "no-cuda"], Flag("run", "--device")),
    (&["device-type", "arch", "gpu-architecture", "march", "mcpu"], Flag("compile", "--target")),
    (
        &[
            "deepspeed",
            "deepspeed-config",
            "deepspeed-mpi",
            "config-file",
            "job.config-file",
            "config-path",
            "config-name",
            "yaml-cfg",
            "accelerate-config",
        ],
        Nothing("flags of `mcc compile` and the sections `train` and `plan` of the model text say everything"),
    ),
    (&["strategy", "parallelism"], Nothing("the mesh says it: `--dp`, `--cp`, `--tp`, `--pp`, `--zero`")),
];

/// Words typed where a command of mcc should be, and that command.
pub const COMMANDS: &[(&str, &str)] = &[
    ("train", "run"),
    ("launch", "run"),
    ("exec", "run"),
    ("start", "run"),
    ("resume", "run"),
    ("pretrain", "run"),
    ("finetune", "run"),
    ("build", "compile"),
    ("make", "compile"),
    ("lint", "check"),
    ("validate", "check"),
    ("verify", "check"),
    ("format", "fmt"),
    ("inspect", "dump"),
    ("show", "dump"),
    ("print", "dump"),
    ("info", "explain"),
    ("why", "explain"),
    ("profile", "run"),
    ("convert", "import"),
    ("load", "import"),
    ("save", "export"),
    ("doctor", "gpu-check"),
];

/// The name of a flag as [`FOREIGN`] has it: `--Num_Layers=4` is `num-layers`.
pub fn normal(flag: &str) -> String {
    let name = flag.trim_start_matches('-');
    name.split('=').next().unwrap_or(name).to_ascii_lowercase().replace('_', "-")
}

/// What there is instead of a flag, however it is written. Of a dotted name, as torchtitan and NeMo have them, the
/// last part counts if the whole is unknown.
pub fn replacement(flag: &str) -> Option<FlagReplacement> {
    let name = normal(flag);
    let of = |name: &str| FOREIGN.iter().find(|(names, _)| names.contains(&name)).map(|(_, replacement)| *replacement);
    of(&name).or_else(|| name.rsplit_once('.').and_then(|(_, last)| of(last)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::{Command, CommandFactory};
    use std::collections::BTreeSet;

    /// All long flags of a command and of those under it.
    fn longs(command: &Command) -> BTreeSet<String> {
        let own = command.get_arguments().flat_map(|a| a.get_long().into_iter().chain(a.get_all_aliases().unwrap_or_default()));
        own.map(|l| format!("--{l}")).chain(command.get_subcommands().flat_map(longs)).collect()
    }

    #[test]
    fn what_tips_name_is_there() {
        let root = Cli::command();
        let all = longs(&root);
        let models = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/models")).expect("models").map(|e| e.expect("an entry").path());
        let texts: String = models.map(|p| std::fs::read_to_string(p).expect("UTF-8")).collect();
        for (names, replacement) in FOREIGN {
            let prose = match replacement {
                Flag(command, flag) => {
                    let known = longs(root.find_subcommand(command).expect("a command"));
                    assert!(known.contains(*flag), "{names:?}: `mcc {command}` has no `{flag}`");
                    ""
                }
                Setting(name) => {
                    let declared = texts.contains(&format!("{name} = ")) || texts.contains(&format!("{name}, "));
                    assert!(declared, "{names:?}: no text of models/ has a setting `{name}`");
                    ""
                }
                Text(prose) | Always(prose) | Nothing(prose) => prose,
            };
            for word in prose.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').filter(|w| w.starts_with("--")) {
                assert!(all.contains(word), "{names:?}: there is no `{word}`");
            }
        }
        for (word, command) in COMMANDS {
            assert!(root.find_subcommand(command).is_some() && root.find_subcommand(word).is_none(), "{word}: {command}");
        }
    }

    #[test]
    fn every_name_is_foreign_and_there_once() {
        let own = longs(&Cli::command());
        let mut seen = BTreeSet::new();
        for name in FOREIGN.iter().flat_map(|(names, _)| *names) {
            assert_eq!(normal(name), *name);
            assert!(!own.contains(&format!("--{name}")), "`--{name}` is mcc's own");
            assert!(seen.insert(name), "`{name}` is there twice");
        }
        assert!(seen.len() >= 250, "{} names", seen.len());
    }

    #[test]
    fn names_are_found_however_they_are_written() {
        for flag in ["--hidden-size", "--hidden_size=8", "--Hidden-Size", "hidden_size", "--model.hidden_size", "model.hidden_size=8"] {
            assert_eq!(replacement(flag), Some(Setting("hidden")), "{flag}");
        }
        assert_eq!(replacement("--training.steps"), Some(Flag("run", "--steps")));
        assert_eq!(replacement("--no-such-thing"), None);
    }
}
