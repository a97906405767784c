//! The command line of `firn store`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;

use crate::containerd::Socket;

/// Show, check and clean the store for the memory of checkpoints.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  firn store ls\n  firn store du\n  firn store gc --dry-run")]
pub enum StoreCommand {
    Ls(LsArgs),
    Du(DuArgs),
    Verify(VerifyArgs),
    Gc(GcArgs),
    Push(PushArgs),
    Pull(PullArgs),
    Export(ExportArgs),
    Import(ImportArgs),
    Name(NameArgs),
    #[command(
        about = "Keep the memory of a checkpoint until `firn store unpin`",
        after_help = "Examples:\n  firn store pin 5f2c9d01\n\n\
                      Exit status: 0 done, 1 failed, 2 wrong usage."
    )]
    Pin(PinArgs),
    #[command(
        about = "Keep the memory of a checkpoint no longer than something on this node names it",
        after_help = "Examples:\n  firn store unpin 5f2c9d01\n\n\
                      Exit status: 0 done, 1 failed, 2 wrong usage."
    )]
    Unpin(PinArgs),
}

/// Which store, and how the result is shown.
#[derive(Debug, clap::Args)]
pub struct Common {
    /// The store: a directory, for `ls` and `verify` also s3://BUCKET/PREFIX. Default: `[images] store` of
    /// the configuration.
    #[arg(long, value_name = "DIR")]
    pub store: Option<PathBuf>,
    /// The file of its key, if it is encrypted. Default: for the store of the configuration its
    /// `[images] store-key`.
    #[arg(long, value_name = "FILE")]
    pub store_key: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// List the checkpoints whose memory is in the store.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn store ls\n  firn store ls --store s3://checkpoints/train\n\n\
                  Exit status: 0 all are complete, 1 one is not or it failed, 2 wrong usage."
)]
pub struct LsArgs {
    #[command(flatten)]
    pub common: Common,
}

/// Show what takes room in the store.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn store du\n  firn store du --store /mnt/shared/store --json\n\n\
                  Exit status: 0 done, 1 failed, 2 wrong usage."
)]
pub struct DuArgs {
    #[command(flatten)]
    pub common: Common,
}

/// Read everything and compare it with its checksums.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn store verify\n  firn store verify 5f2c9d01 --repair\n\n\
                  Exit status: 0 all is there and whole, 1 something was damaged or is missing, or it \
                  failed, 2 wrong usage."
)]
pub struct VerifyArgs {
    /// A checkpoint, by its id in `firn store ls`. Default: the whole store.
    pub id: Option<String>,
    /// Remove what is damaged: it can then be brought again, or is written again by the next checkpoint.
    #[arg(long)]
    pub repair: bool,
    #[command(flatten)]
    pub common: Common,
}

/// Remove the memory of checkpoints that are gone.
///
/// What is absent proves nothing: a checkpoint may have been moved, archived or unmounted. So the memory of a
/// checkpoint goes only after `firn images prune` has removed it, or `firn store unpin` has stated that it is
/// gone, and while nothing on this node is seen to name it. Memory of other nodes is kept.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn store gc --dry-run\n  firn store gc --unreferenced-since 7d\n\n\
                  Exit status: 0 done, 1 failed, and nothing was removed that is needed, 2 wrong usage."
)]
pub struct GcArgs {
    /// Show what would be removed, and remove nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Keep what is younger: a whole number and s, m, h or d.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration)]
    pub grace: Duration,
    /// Also remove what nothing on this node is seen to name for so long, and what nobody has stated to be
    /// gone. The time begins with the first `firn store gc` that sees it so. Checkpoints in archives, in
    /// directories that were moved, and on other nodes are not seen: pin them.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub unreferenced_since: Option<Duration>,
    /// Also decide on checkpoints of other nodes, whose directories and images this one does not see.
    #[arg(long)]
    pub other_hosts: bool,
    /// The machine has no containerd.
    #[arg(long, conflicts_with = "address")]
    pub no_containerd: bool,
    #[command(flatten)]
    pub socket: Socket,
    #[command(flatten)]
    pub common: Common,
}

/// Copy memory into another store: on a shared file system, or in a bucket of an object store.
///
/// What is there already is not copied again. A directory that is absent or empty becomes a store, and so
/// does a prefix of a bucket. The environment has what the bucket needs: AWS_ACCESS_KEY_ID,
/// AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL and others that begin with AWS_.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  firn store push /mnt/shared/store\n  \
                  openssl rand -hex 32 >/etc/firn/bucket.key && chmod 600 /etc/firn/bucket.key\n  \
                  firn store push s3://checkpoints/train --compress --key /etc/firn/bucket.key\n\n\
                  Exit status: 0 all is there, 1 it failed, and can be tried again, 2 wrong usage.")]
pub struct PushArgs {
    /// The other store: a directory, file:///DIR, or s3://BUCKET/PREFIX.
    pub url: PathBuf,
    /// Encrypt with the key in this file, of mode 600: 64 hexadecimal digits. For a new store, and from then
    /// on always for that one.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Compress. For a new store; one that compresses does so from then on.
    #[arg(long)]
    pub compress: bool,
    /// A checkpoint, by its id in `firn store ls`. Default: all.
    pub id: Option<String>,
    #[command(flatten)]
    pub common: Common,
}

/// Copy the memory of a checkpoint from another store into that of this node.
///
/// What is there already is not copied again. Everything is compared with its checksums. For a bucket the
/// environment is read as by `firn store push`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  firn store pull /mnt/shared/store 5f2c9d01\n  \
                  firn store pull s3://checkpoints/train 5f2c9d01 --key /etc/firn/bucket.key\n\n\
                  Exit status: 0 it is there, 1 it failed, and can be tried again, 2 wrong usage.")]
pub struct PullArgs {
    /// The other store: a directory, file:///DIR, or s3://BUCKET/PREFIX.
    pub url: PathBuf,
    /// The checkpoint, by its id; the first digits are enough.
    pub id: String,
    /// The file of the other store's key, if that is encrypted.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    #[command(flatten)]
    pub common: Common,
}

/// Copy an image directory, with its memory from the store put into CRIU's files.
///
/// The copy needs no store: CRIU reads all of its memory. `firn restore --dir` restores it.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn store export ./images/job ./images/job-inline\n\n\
                  Exit status: 0 it is written, 1 it failed, and nothing is left of it, 2 wrong usage."
)]
pub struct ExportArgs {
    /// The image directory of the checkpoint.
    pub dir: PathBuf,
    /// Where the copy is written: a directory that is empty or not there yet.
    pub out: PathBuf,
    #[command(flatten)]
    pub common: Common,
}

/// Copy an inline image directory, with its large memory put into the store.
///
/// The copy is what a checkpoint into the store would have made. It is restored as such a one.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn store import ./images/job-inline ./images/job\n\n\
                  Exit status: 0 it is written, 1 it failed, and nothing is left of it, 2 wrong usage."
)]
pub struct ImportArgs {
    /// The image directory of the checkpoint.
    pub dir: PathBuf,
    /// Where the copy is written: a directory that is empty or not there yet.
    pub out: PathBuf,
    #[command(flatten)]
    pub common: Common,
}

/// Put a copy of an image directory into the store, under a name that pods of a namespace may use.
///
/// Pods are restored from it by the annotation `firn.dev/restore-from: store:NAME`, where `[restore]
/// from-store` permits that. With the namespace `_signed`, the checkpoint's signature names the namespaces.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn store name ./images/server default/server\n\n\
                  Exit status: 0 it is there, 1 it failed, and nothing is left of it, 2 wrong usage."
)]
pub struct NameArgs {
    /// The image directory of the checkpoint, or the directory of an unpacked Kubernetes checkpoint.
    pub dir: PathBuf,
    /// NAMESPACE/NAME.
    pub name: String,
    #[command(flatten)]
    pub common: Common,
}

/// Which checkpoint.
#[derive(Debug, clap::Args)]
pub struct PinArgs {
    /// The checkpoint, by its id in `firn store ls`; the first digits are enough.
    pub id: String,
    #[command(flatten)]
    pub common: Common,
}

pub fn duration(text: &str) -> Result<Duration, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400)];
    let seconds = firn_config::parse_quantity(text, &units);
    seconds
        .map(Duration::from_secs)
        .ok_or_else(|| "write a whole number and a unit of s, m, h or d, as in 1h".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit() {
        for (text, seconds) in [
            ("0s", 0),
            ("90s", 90),
            ("10m", 600),
            ("1h", 3600),
            ("7d", 604_800),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)));
        }
        for text in [
            "",
            "1",
            "h",
            "1w",
            "-1h",
            "1.5h",
            "99999999999999999999s",
            "999999999999999999d",
        ] {
            assert!(duration(text).is_err(), "{text:?} was taken");
        }
    }
}
