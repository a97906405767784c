//! How long a checkpoint and a restore take, by measured rates.

use serde::Serialize;

/// Where the rates come from.
const BASIS: &str = "rates of an H200 with driver 580.159.04 and images in memory \
                     (docs/evidence/gpu-runs.md); without what a client packs and moves";

const GIB: f64 = (1_u64 << 30) as f64;

/// gpu-checkpoint: bytes per second that the driver copies for each process, and seconds for each call.
const GPU_CHECKPOINT: (f64, f64) = (2.1 * GIB, 0.4);
/// gpu-restore: the same in the other direction.
const GPU_RESTORE: (f64, f64) = (5.0 * GIB, 0.3);
/// What CRIU writes, for all processes together.
const DUMP: (f64, f64) = (1.8 * GIB, 0.4);
/// What CRIU reads.
const RESTORE: (f64, f64) = (1.5 * GIB, 0.5);
/// What is read for checksums.
const CHECKSUMS: (f64, f64) = (9.5 * GIB, 0.0);

/// Seconds, roughly.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Until the workload continues; `None` for an image that exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_s: Option<f64>,
    pub restore_s: f64,
    pub basis: &'static str,
}

impl Estimate {
    /// `largest` is the GPU memory of the process that has most: the driver works on all of them at once.
    pub fn of(largest: u64, image: u64) -> Self {
        let back = seconds(largest, GPU_RESTORE);
        let checkpoint =
            seconds(largest, GPU_CHECKPOINT) + seconds(image, DUMP) + seconds(image, CHECKSUMS) + back;
        Self {
            checkpoint_s: Some(tenths(checkpoint)),
            ..Self::of_restore(largest, image)
        }
    }

    /// For an image that exists.
    pub fn of_restore(largest: u64, image: u64) -> Self {
        let back = seconds(largest, GPU_RESTORE);
        Self {
            checkpoint_s: None,
            restore_s: tenths(seconds(image, CHECKSUMS) + seconds(image, RESTORE) + back),
            basis: BASIS,
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "an estimate needs no exact bytes")]
fn seconds(bytes: u64, (rate, base): (f64, f64)) -> f64 {
    base + bytes as f64 / rate
}

fn tenths(seconds: f64) -> f64 {
    (seconds * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of docs/evidence/gpu-runs.md: GiB on the GPU, seconds in the shim.
    #[test]
    fn estimates_are_near_the_measured_times() {
        for (gib, checkpoint, restore) in [(8_u64, 11.1, 8.0), (32, 41.2, 27.8)] {
            let found = Estimate::of(gib << 30, (gib << 30) + (300 << 20));
            assert!(
                (found.checkpoint_s.unwrap() / checkpoint - 1.0).abs() < 0.25,
                "{gib} GiB: {found:?}"
            );
            assert!(
                (found.restore_s / restore - 1.0).abs() < 0.25,
                "{gib} GiB: {found:?}"
            );
        }
    }
}
