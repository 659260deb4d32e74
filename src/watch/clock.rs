//! The time of day, as logs have it.

use std::time::SystemTime;

/// Seconds since 1970; 0 before.
pub fn seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

pub fn now() -> f64 {
    seconds(SystemTime::now())
}
