//! The command line.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use simgpu_model::fault::{self, Action, Call, Follows, Rule, When};
use simgpu_model::{NvLinks, paths};

use crate::setup::{GpuRequest, Request};
use crate::{cdi, install, loops, setup, smi};

/// Simulated GPUs for tests.
///
/// SIMGPU_DEV names a directory that stands in for /dev, SIMGPU_STATE one for /run/simgpu; the libraries
/// honour both.
#[derive(Parser)]
#[command(name = "simgpu", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make the device nodes; does nothing when they are there as asked for
    Setup(SetupArgs),
    /// Remove the device nodes and the memory behind them
    Teardown {
        /// Instead of this node's devices, those of nodes that no longer exist
        #[arg(long)]
        stale: bool,
    },
    /// Print a CDI specification
    Cdi,
    /// Show GPUs, memory and processes
    Smi,
    /// Copy the built driver libraries where a driver's installer puts them
    Install {
        /// Build directory with libcuda.so and libnvidia_ml.so
        #[arg(long)]
        from: PathBuf,
        /// Root of the node
        #[arg(long, default_value = "/")]
        root: PathBuf,
        /// Driver version in the file names
        #[arg(long, default_value = DRIVER)]
        driver: String,
    },
    /// Edit the fault script
    #[command(subcommand)]
    Fault(FaultCommand),
}

const DRIVER: &str = "580.159.04";

#[derive(Args)]
struct SetupArgs {
    /// A GPU: name=, uuid=, mem= (512M, 1G), pci= (address), device= (PCI device id, 0x233510de), minor=,
    /// mig=on|off, persistence=on|off; all may be left out
    #[arg(long = "gpu", value_parser = parse_gpu)]
    gpu: Vec<GpuRequest>,
    /// Number of GPUs when none is described
    #[arg(long, default_value_t = 2, conflicts_with = "gpu")]
    gpus: usize,
    /// NVLinks between two GPUs, by their places: 0-1=4
    #[arg(long = "nvlinks", value_parser = parse_links)]
    nvlinks: Vec<NvLinks>,
    /// NVLinks of every GPU to switches
    #[arg(long)]
    nvswitch: Option<u32>,
    /// Driver version
    #[arg(long, default_value = DRIVER)]
    driver: String,
    /// Give UVM's nodes another major number: the kernel picks that of the real ones when the driver is
    /// loaded
    #[arg(long)]
    other_majors: bool,
    /// CUDA version (13000 is 13.0)
    #[arg(long, default_value_t = 13000)]
    cuda: i32,
}

#[derive(Subcommand)]
enum FaultCommand {
    /// Add a rule
    Add(FaultArgs),
    /// Print the script
    List,
    /// Remove all rules
    Clear,
}

#[derive(Clone, Copy, ValueEnum)]
enum CallName {
    Init,
    State,
    Tid,
    Lock,
    Checkpoint,
    Restore,
    Unlock,
}

#[derive(Args)]
struct FaultArgs {
    /// The call that fails
    #[arg(long)]
    call: CallName,
    /// Only for this process
    #[arg(long)]
    pid: Option<i32>,
    /// Only for processes with this name
    #[arg(long)]
    comm: Option<String>,
    /// First matching call that is disturbed
    #[arg(long, default_value_t = 1)]
    nth: u64,
    /// How often (default: for ever)
    #[arg(long)]
    times: Option<u64>,
    /// Only when the rule at this place of the script has acted
    #[arg(long, conflicts_with = "follows_file")]
    follows_rule: Option<usize>,
    /// Only when this file is there
    #[arg(long)]
    follows_file: Option<PathBuf>,
    /// Carry the call out first
    #[arg(long)]
    after: bool,
    #[command(flatten)]
    action: ActionArgs,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct ActionArgs {
    /// Answer this CUresult, by name (CUDA_ERROR_UNKNOWN)
    #[arg(long)]
    error: Option<String>,
    /// Wait this long
    #[arg(long)]
    delay_ms: Option<u64>,
    /// Have the process copy its memory for so long
    #[arg(long)]
    transfer_ms: Option<u32>,
    /// Never return
    #[arg(long)]
    hang: bool,
    /// Abort the calling process
    #[arg(long)]
    crash: bool,
}

/// Carries the command out.
pub fn run(cli: Cli) -> Result<()> {
    let dev = paths::dev_dir();
    match cli.command {
        Command::Setup(args) => {
            let gpus = if args.gpu.is_empty() {
                vec![GpuRequest::default(); args.gpus]
            } else {
                args.gpu
            };
            ensure!(!gpus.is_empty(), "a node needs at least one GPU");
            let table = setup::setup(
                &dev,
                Request {
                    driver_version: args.driver,
                    cuda_version: args.cuda,
                    gpus,
                    links: args
                        .nvlinks
                        .into_iter()
                        .chain(args.nvswitch.map(NvLinks::ToSwitches))
                        .collect(),
                    other_majors: args.other_majors,
                },
            )?;
            for gpu in table.gpus {
                println!("{} {} {}", dev.join(&gpu.node.name).display(), gpu.uuid, gpu.name);
            }
            Ok(())
        }
        Command::Teardown { stale: false } => setup::teardown(&dev),
        Command::Teardown { stale: true } => {
            let detached = loops::detach_stale(&dev)?;
            println!("detached {detached}");
            Ok(())
        }
        Command::Cdi => {
            println!("{:#}", cdi::specification(&setup::table(&dev)?));
            Ok(())
        }
        Command::Smi => smi::print(&dev),
        Command::Install { from, root, driver } => install::install(&from, &root, &driver),
        Command::Fault(command) => run_fault(command),
    }
}

fn run_fault(command: FaultCommand) -> Result<()> {
    let state = paths::state_dir();
    match command {
        FaultCommand::Add(args) => fault::edit(&state, |script| script.rules.push(args.rule()))?,
        FaultCommand::Clear => fault::edit(&state, |script| script.rules.clear())?,
        FaultCommand::List => {
            let script = fault::edit(&state, |script| script.clone())?;
            println!("{}", serde_json::to_string_pretty(&script)?);
        }
    }
    Ok(())
}

impl FaultArgs {
    fn rule(self) -> Rule {
        let call = match self.call {
            CallName::Init => Call::Init,
            CallName::State => Call::State,
            CallName::Tid => Call::Tid,
            CallName::Lock => Call::Lock,
            CallName::Checkpoint => Call::Checkpoint,
            CallName::Restore => Call::Restore,
            CallName::Unlock => Call::Unlock,
        };
        let action = match self.action {
            ActionArgs {
                error: Some(name), ..
            } => Action::Error(name),
            ActionArgs {
                delay_ms: Some(delay),
                ..
            } => Action::DelayMs(delay),
            ActionArgs {
                transfer_ms: Some(transfer),
                ..
            } => Action::TransferMs(transfer),
            ActionArgs { hang: true, .. } => Action::Hang,
            ActionArgs { .. } => Action::Crash,
        };
        let file = self.follows_file.map(Follows::File);
        let when = if self.after { When::After } else { When::Before };
        Rule {
            call,
            pid: self.pid,
            comm: self.comm,
            follows: self.follows_rule.map(Follows::Rule).or(file),
            nth: self.nth,
            times: self.times,
            when,
            action,
            seen: 0,
        }
    }
}

fn parse_gpu(text: &str) -> Result<GpuRequest> {
    let mut gpu = GpuRequest::default();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (key, value) = part
            .split_once('=')
            .with_context(|| format!("{part:?} is not key=value"))?;
        match key {
            "name" => gpu.name = Some(value.to_owned()),
            "uuid" => gpu.uuid = Some(value.parse()?),
            "mem" => gpu.memory = Some(parse_size(value)?),
            "pci" => gpu.pci_address = Some(value.to_owned()),
            "device" => gpu.pci_device_id = Some(parse_hex(value)?),
            "minor" => gpu.minor = Some(value.parse().context("minor= takes a number")?),
            "mig" => gpu.mig = parse_switch(value)?,
            "persistence" => gpu.persistence = Some(parse_switch(value)?),
            _ => bail!("unknown key {key:?}; hint: name, uuid, mem, pci, device, minor, mig, persistence"),
        }
    }
    Ok(gpu)
}

fn parse_links(text: &str) -> Result<NvLinks> {
    let (pair, count) = text.split_once('=').context("NVLinks are A-B=COUNT")?;
    let (a, b) = pair.split_once('-').context("NVLinks are A-B=COUNT")?;
    Ok(NvLinks::Between(a.parse()?, b.parse()?, count.parse()?))
}

fn parse_size(text: &str) -> Result<u64> {
    let (digits, unit) = match text.char_indices().find(|(_, c)| !c.is_ascii_digit()) {
        Some((at, _)) => text.split_at(at),
        None => (text, ""),
    };
    let shift = match unit.trim_end_matches("iB") {
        "" => 0,
        "M" => 20,
        "G" => 30,
        _ => bail!("{text:?} is not a size; hint: 512M, 1G"),
    };
    let value: u64 = digits
        .parse()
        .with_context(|| format!("{text:?} is not a size"))?;
    value
        .checked_shl(shift)
        .filter(|size| size >> shift == value)
        .context("size too large")
}

fn parse_hex(text: &str) -> Result<u32> {
    u32::from_str_radix(text.trim_start_matches("0x"), 16)
        .with_context(|| format!("{text:?} is not a hex number"))
}

fn parse_switch(text: &str) -> Result<bool> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => bail!("{text:?} is neither on nor off"),
    }
}

#[cfg(test)]
mod tests {
    use super::{NvLinks, parse_gpu, parse_links, parse_size};

    #[test]
    fn reads_gpu_descriptions() {
        let gpu = parse_gpu("name=NVIDIA A100,mem=512M,minor=3,mig=on").unwrap();
        assert_eq!(
            (gpu.name.as_deref(), gpu.memory, gpu.minor),
            (Some("NVIDIA A100"), Some(512 << 20), Some(3))
        );
        assert!(gpu.mig);
        for bad in ["mem=1X", "uuid=1", "colour=red", "minor"] {
            assert!(parse_gpu(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn reads_links() {
        assert_eq!(parse_links("0-1=4").unwrap(), NvLinks::Between(0, 1, 4));
        for bad in ["0-1", "0=4", "a-1=4", ""] {
            assert!(parse_links(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn reads_sizes() {
        assert_eq!(parse_size("1GiB").unwrap(), 1 << 30);
        assert_eq!(parse_size("4096").unwrap(), 4096);
        assert!(parse_size("99999999999999999999G").is_err());
        assert!(parse_size("").is_err());
    }
}
