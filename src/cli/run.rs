//! What `mcc run` takes.

use super::values::{from_one, minutes, spike, threads, whole};
use clap::{ArgGroup, Args, ValueEnum};
use std::path::PathBuf;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnNonfinite {
    /// End the run, naming step, rank and the op that made it
    Stop,
    /// Leave the step's update out, and count it
    Skip,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    /// This machine's CPU
    Cpu,
    /// NVIDIA GPUs of this machine; ranks share them if they are more
    Cuda,
    /// The emulator: kernels for GPUs, run and checked on this machine's CPU. Slow
    Emulated,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Exchanges {
    /// Through memory that ranks of a machine share, over TCP between a few machines
    Host,
    /// By the machines' MPI, for CPU ranks that its launcher or srun started
    Mpi,
    /// GPUs by themselves, by NCCL: each rank has one of its own
    Nccl,
}

/// What may be another than a run had that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Changed {
    Model,
    Data,
    Batch,
    Rate,
    Optimizer,
    Precision,
}

/// Tokens of files that do not say what they hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DataDtype {
    Uint16,
    Uint32,
    Int32,
}

/// What becomes of a document that is longer than a sequence, where documents are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Packing {
    /// It is cut to a sequence, and what is behind is left out
    Cut,
    /// It is split into sequences and a rest, which is packed as documents are
    Split,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnSpike {
    /// Go on as if nothing had happened
    Ignore,
    /// Go back to the last checkpoint before that step, and leave out the data of the steps since: one of
    /// --restarts
    Back,
}

impl RunArgs {
    /// Whether flags name data sets.
    pub fn has_sets(&self) -> bool {
        !self.data_path.is_empty() || !self.train_data_path.is_empty() || self.data_args_path.is_some() || self.per_split_data_args_path.is_some()
    }
}

#[derive(Args)]
#[command(group = ArgGroup::new("timed").multiple(true))]
pub struct RunArgs {
    /// What `mcc compile` wrote
    pub artifact: PathBuf,
    /// Run what this key has signed and nothing else (several: what one of them has): the PEM file of the public half
    /// (`openssl pkey -in secret.pem -pubout -out public.pem`) of the key that `mcc compile --sign` had
    #[arg(long, value_name = "PUBLIC.pem")]
    pub trust: Vec<PathBuf>,
    /// A UTF-8 text (its bytes are tokens), an llm.c .bin, a .npy of tokens [steps, batch, seq+1], or one .npy per input
    #[arg(long, value_name = "[INPUT=]FILE")]
    pub data: Vec<String>,
    /// Data sets of tokens as Megatron-LM's (`mcc data tokenize`), in its order: one prefix, or weights and prefixes
    /// in turn, or prefixes alone, of which one epoch is read; 'dir/*.bin' stands for all that fit
    #[arg(long, value_name = "[WEIGHT] PREFIX", num_args = 1.., conflicts_with_all = ["data", "valid_data", "bytes", "data_dtype"])]
    pub data_path: Vec<String>,
    /// Weights by which each data set's documents are those of training, validation and test [default: 969,30,1]
    #[arg(long, value_name = "T,V,E", conflicts_with_all = ["train_data_path", "per_split_data_args_path"])]
    pub split: Option<String>,
    /// Data sets of training alone
    #[arg(long, value_name = "[WEIGHT] PREFIX", num_args = 1.., conflicts_with_all = ["data_path", "data", "valid_data", "bytes", "data_dtype"])]
    pub train_data_path: Vec<String>,
    /// Data sets of validation, beside `--train-data-path`
    #[arg(long, value_name = "[WEIGHT] PREFIX", num_args = 1.., requires = "train_data_path")]
    pub valid_data_path: Vec<String>,
    /// Data sets for the loss after the last step, beside `--train-data-path`
    #[arg(long, value_name = "[WEIGHT] PREFIX", num_args = 1.., requires = "train_data_path")]
    pub test_data_path: Vec<String>,
    /// A file with what `--data-path` takes, where that is long
    #[arg(long, value_name = "FILE", conflicts_with_all = ["data_path", "train_data_path", "data", "valid_data", "bytes", "data_dtype"])]
    pub data_args_path: Option<PathBuf>,
    /// A file of JSON with what `--train-data-path`, `--valid-data-path` and `--test-data-path` take: {"train": [..],
    /// "valid": [..], "test": [..]}
    #[arg(long, value_name = "FILE", conflicts_with_all = ["data_args_path", "data_path", "train_data_path", "data", "valid_data", "bytes", "data_dtype"])]
    pub per_split_data_args_path: Option<PathBuf>,
    /// Where orders of samples of data sets are kept [default: PREFIX.cache beside each]
    #[arg(long, value_name = "DIR")]
    pub data_cache_path: Option<PathBuf>,
    /// Each sequence has whole documents of the data sets, as many as fit, with nothing behind them: for models that
    /// keep documents apart (`-D packed=true`), as for fine-tuning. Longer ones are cut to a sequence; with
    /// --packing=split all of them is read
    #[arg(long, value_enum, value_name = "LONG", num_args = 0..=1, require_equals = true, default_missing_value = "cut")]
    pub packing: Option<Packing>,
    /// Which tokens of data sets count as labels: those whose number is 1 in PREFIX.mask.bin and PREFIX.mask.idx,
    /// which `mcc data tokenize --prompt-field` writes for answers alone
    #[arg(long)]
    pub loss_mask: bool,
    /// Bytes of files are tokens even if they are no text; .npy and llm.c's files are read as what they are
    #[arg(long, conflicts_with = "data_dtype")]
    pub bytes: bool,
    /// Files that are neither .npy nor llm.c's are such tokens, one after the other, little-endian: nanoGPT's .bin (uint16), Megatron's (by its .idx)
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub data_dtype: Option<DataDtype>,
    /// Held-out data, of the same kinds
    #[arg(long, value_name = "[INPUT=]FILE")]
    pub valid_data: Vec<String>,
    /// Steps between held-out losses; 0 is never. Of data sets there is one after the last step too, and one of test
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = whole::<u64>)]
    pub eval_interval: u64,
    /// Most global batches of a held-out loss; of data sets so many, each time the next
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = from_one::<u64>)]
    pub eval_iters: u64,
    /// Of validation data sets, each has a loss of its own, `valid_loss/wiki` of the data set `wiki`, and
    /// `valid_loss` is their mean
    #[arg(long)]
    pub multiple_validation_sets: bool,
    /// What these are called [default: the names of their files]
    #[arg(long, value_name = "NAME", num_args = 1.., requires = "multiple_validation_sets")]
    pub validation_set_names: Vec<String>,
    /// Each evaluation takes all samples of one epoch of the validation data sets, in whole global batches
    #[arg(long)]
    pub full_validation: bool,
    /// Default: all of a .npy, else the schedule's, else once through the data
    #[arg(long, visible_alias = "train-iters", value_name = "N", value_parser = whole::<u64>)]
    pub steps: Option<u64>,
    /// End the run early, with everything saved and exit code 75, after a step that is a multiple of N; 0 is never
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = whole::<u64>)]
    pub exit_interval: u64,
    /// End it so after the step that is under way M minutes from the run's start, for a job whose time is limited: 0.5 is half a minute
    #[arg(long, visible_alias = "exit-duration", value_name = "M", value_parser = minutes)]
    pub exit_duration_in_mins: Option<f64>,
    /// Initial weights, whole tensors under mcc's names, or those of a checkpoint; several, as of a base and of
    /// what is added to it, have each tensor once. By default drawn by name and seed
    #[arg(long, value_name = "WEIGHTS.safetensors")]
    pub init: Vec<PathBuf>,
    /// Parameters that no file of --init need have, and that are drawn then: `*` stands for any text, and
    /// numbers of layers may be left out
    #[arg(long, value_name = "PATTERN", requires = "init")]
    pub allow_missing: Vec<String>,
    /// Go on from the newest checkpoint in DIR that can be read, or from the one that DIR is, on any mesh, with
    /// that run's seed
    #[arg(long, value_name = "DIR", conflicts_with_all = ["init", "resume"])]
    pub load: Option<PathBuf>,
    /// Go on after the step at which `--save-state` wrote this; `auto`: as `--load` of `--save`'s directory if
    /// it has checkpoints, else begin, of --init or anew
    #[arg(long, value_name = "STATE.safetensors|auto")]
    pub resume: Option<PathBuf>,
    /// What of this run may be another than that had which it goes on with: the model's text and settings, the
    /// files of data, the sequences of a step, the learning rate of steps to come, the optimizer with its numbers,
    /// the precision of activations. Whatever else differs is refused
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WHAT")]
    pub allow_changed: Vec<Changed>,
    /// Where checkpoints go, a directory each: weights, optimizer states, the step. There is one after the last
    /// step, and after the one with which the run ends early
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// A checkpoint after each step that is a multiple of N, too; 0 is never
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = whole::<u64>)]
    pub save_interval: u64,
    /// And one S seconds after the last was complete: a checkpoint that takes long does not crowd training out
    #[arg(long, value_name = "S", value_parser = from_one::<u64>)]
    pub save_seconds: Option<u64>,
    /// Keep the last K checkpoints alone; by default all
    #[arg(long, value_name = "K", value_parser = from_one::<u64>)]
    pub keep: Option<u64>,
    /// If a rank dies or hangs, start all again from the last checkpoint, R times at most
    #[arg(long, default_value_t = 0, value_name = "R", value_parser = whole::<u64>)]
    pub restarts: u64,
    /// Where to write the trained weights
    #[arg(long, value_name = "WEIGHTS.safetensors")]
    pub save_weights: Option<PathBuf>,
    /// Where to write what `--resume` needs as one file: weights, optimizer states and the step
    #[arg(long, value_name = "STATE.safetensors")]
    pub save_state: Option<PathBuf>,
    /// One JSON object per step; a run that resumes appends to it
    #[arg(long, value_name = "FILE.jsonl")]
    pub metrics: Option<PathBuf>,
    /// All that a report of the run is made of (`mcc report DIR`): metrics.jsonl, as of --metrics, and
    /// run.jsonl, with what is run, checkpoints, restarts and warnings. A run that resumes appends
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Where TensorBoard's event files go: `tensorboard --logdir DIR` shows the run while it trains
    #[arg(long, value_name = "DIR")]
    pub tensorboard_dir: Option<PathBuf>,
    /// Replace what exists of --save, --save-weights, --save-state, --metrics, --log-dir and --trace; without
    /// it the run is refused. What --load and --resume read may always be saved to
    #[arg(long)]
    pub force: bool,
    /// Steps after which a rank is named that is slower than others that do the same; 0 is never. `--log-dir`
    /// keeps the times of all ranks
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = whole::<u64>)]
    pub straggler_interval: u64,
    /// Steps after which, and after the last, ranks compare what several of them hold: parameters and optimizer
    /// states, to the bit. Numbers that differ, as where hardware corrupts them in silence, end the run; 0 is never
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = whole::<u64>)]
    pub check_replicas: u64,
    /// Before the first step, hold loss and gradient norm of a few sequences of its batch, copied to fill it,
    /// to those of the model interpreted on one rank, in f64: slow, for small models. Without a number up to 4
    /// sequences; as many as the batch has show most. The run ends where rounding does not explain a difference
    #[arg(long, value_name = "SEQUENCES", num_args = 0..=1, require_equals = true, value_parser = from_one::<u64>)]
    pub check_first_step: Option<Option<u64>>,
    /// Steps between lines; the first, the last, and those that evaluate or are skipped have one too [default: 10, and a bar on a terminal]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub log_interval: Option<u64>,
    /// Print errors and warnings alone
    #[arg(short, long, conflicts_with_all = ["verbose", "log_interval", "compare"])]
    pub quiet: bool,
    /// Print also where ranks are and on how many threads, what is read, and all that the model reports of a step
    #[arg(short, long)]
    pub verbose: bool,
    /// Print the time per kernel and communication against what this machine can do at most, and write a trace of all ranks and streams for
    /// ui.perfetto.dev. Without --steps, the run ends with the steps that are timed
    #[arg(long, group = "timed")]
    pub profile: bool,
    /// Print the time of a step, of families of kernels and of exchanges beside what `mcc simulate` says of them on a
    /// machine file, or a name of `mcc machine ls`; of CPUs. Without --steps, the run ends with the steps that are timed
    #[arg(long, value_name = "FILE|NAME", group = "timed")]
    pub compare: Option<String>,
    /// Steps to time, after two of warm-up
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = from_one::<u64>, requires = "timed")]
    pub profile_steps: u64,
    /// Where the trace goes [default: the artifact's name with .trace.json]
    #[arg(long, value_name = "FILE.json", requires = "profile")]
    pub trace: Option<PathBuf>,
    /// Default: the cores of this machine over the ranks
    #[arg(long, value_name = "T", value_parser = threads)]
    pub threads_per_rank: Option<usize>,
    /// Of weights that are drawn, of dropout, and of the order of data sets' samples (Megatron-LM's default: 1234)
    #[arg(long, default_value_t = 0, value_name = "S", value_parser = whole::<u64>)]
    pub seed: u64,
    /// When loss or gradient norm is not finite
    #[arg(long, value_enum, default_value = "stop")]
    pub on_nonfinite: OnNonfinite,
    /// With `--on-nonfinite skip`, end the run after so many skipped steps in a row, with an error
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_skips: u64,
    /// When a loss jumps
    #[arg(long, value_enum, default_value = "ignore")]
    pub on_spike: OnSpike,
    /// A jump is to more than F times the median of the last 32 losses
    #[arg(long, default_value_t = 2.0, value_name = "F", value_parser = spike)]
    pub spike_factor: f64,
    /// What runs in place of ARTIFACT where a launcher has started another number of ranks, if it has as many:
    /// the same model compiled for fewer machines, for when one stays away. The run says so
    #[arg(long, value_name = "OTHER.mcc")]
    pub fallback: Vec<PathBuf>,
    /// What runs the kernels [default: what the artifact was compiled for]
    #[arg(long, value_enum)]
    pub device: Option<DeviceKind>,
    /// How ranks exchange
    #[arg(long, value_enum, default_value = "host")]
    pub exchanges: Exchanges,
    /// The directory in which ranks keep what an artifact has on a disk (`mcc compile --optimizer-offload=disk`,
    /// `--param-offload=disk`): on a fast drive of each machine, with room for all ranks there. Files have no name and
    /// are gone with the run
    #[arg(long, value_name = "DIR")]
    pub offload_to: Option<PathBuf>,
    /// Most thread blocks of a kernel of NCCL's: so many multiprocessors of a card are its, and its buffers are as
    /// many
    #[arg(long, value_name = "N", default_value_t = runtime::gpu::nccl::MAX_CTAS, value_parser = clap::value_parser!(u32).range(1..=32))]
    pub nccl_max_ctas: u32,
    /// Run commands one after the other, communication too; for comparison
    #[arg(long)]
    pub in_order: bool,
    /// Where ranks meet that torchrun, mpirun or srun started: rank 0's machine and a free port of it [default: as these say]
    #[arg(long, value_name = "HOST:PORT")]
    pub rendezvous: Option<String>,
    /// The secret by which such ranks know each other: a file that only its owner may read, with the same 16 bytes or more for every rank [default: the environment variable
    /// MCC_SECRET; without a secret ranks meet on one machine only]
    #[arg(long, value_name = "FILE", conflicts_with = "insecure_rendezvous")]
    pub secret_file: Option<PathBuf>,
    /// Let ranks of several machines meet without a secret: whoever reaches their ports can then join the run, change its data and end it
    #[arg(long)]
    pub insecure_rendezvous: bool,
    /// How long such ranks may take to come together
    #[arg(long, default_value_t = 300, value_name = "SECONDS", value_parser = from_one::<u64>)]
    pub rendezvous_timeout: u64,
}
