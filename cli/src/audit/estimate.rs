//! What a checkpoint and a restore take, from rates that were measured.

use serde::Serialize;

/// Where the rates come from.
const BASIS: &str = "rates of an H200 with driver 580.159.04 and images in memory (docs/evidence/gpu-runs.md); \
                     without what a client packs and moves";

const GIB: f64 = (1_u64 << 30) as f64;

/// Bytes per second that the driver copies out of the GPU, per process, and what each such call takes besides.
const TAKE: (f64, f64) = (2.1 * GIB, 0.4);
/// That it copies back.
const GIVE_BACK: (f64, f64) = (5.0 * GIB, 0.3);
/// That CRIU writes, all processes together.
const DUMP: (f64, f64) = (1.8 * GIB, 0.4);
/// That it reads.
const RESTORE: (f64, f64) = (1.5 * GIB, 0.5);
/// That are summed up.
const CHECKSUMS: (f64, f64) = (9.5 * GIB, 0.0);

/// Seconds, roughly.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Until the workload runs on; none for an image, which is made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_s: Option<f64>,
    pub restore_s: f64,
    pub basis: &'static str,
}

impl Estimate {
    /// `largest` is the GPU memory of the process that has most: the driver works on all of them at once.
    pub fn of(largest: u64, image: u64) -> Self {
        let back = seconds(largest, GIVE_BACK);
        let checkpoint = seconds(largest, TAKE) + seconds(image, DUMP) + seconds(image, CHECKSUMS) + back;
        Self {
            checkpoint_s: Some(tenths(checkpoint)),
            ..Self::of_restore(largest, image)
        }
    }

    /// Of an image.
    pub fn of_restore(largest: u64, image: u64) -> Self {
        let back = seconds(largest, GIVE_BACK);
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

    /// Of the tables in docs/evidence/gpu-runs.md: GiB on the GPU, seconds in the shim.
    #[test]
    fn estimates_are_near_what_was_measured() {
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
