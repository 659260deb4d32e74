//! What a compile itself may take.

use super::values::bytes;
use clap::Args;

#[derive(Args, Clone)]
#[command(next_help_heading = "Limits of the compiler itself")]
pub struct LimitArgs {
    /// Most memory that mcc and its workers may hold, for example `8GiB`: more is an error that says what grew [default: 7/8 of what the machine, or its control group, has]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub limit_memory: Option<u64>,
    /// Most seconds that a compile may take
    #[arg(long, value_name = "S", default_value_t = 3600, value_parser = clap::value_parser!(u64).range(1..))]
    pub limit_seconds: u64,
}
