//! `firn plan`: which GPUs a restore would use.

use std::path::Path;

use anyhow::{Context, Result};
use firn_cdi::Registry;
use firn_config::Config;
use firn_gpu::Inventory;
use firn_oci::manifest::Manifest;
use firn_oci::{Ask, Basis, Decision, Spec, mounts};
use serde_json::json;

use crate::args::PlanArgs;
use crate::failure::Failure;
use crate::program;

/// A restore that would be accepted.
struct Accepted {
    manifest: Option<Manifest>,
    /// Absent when the checkpoint holds no GPU state.
    gpus: Option<(Decision, Inventory)>,
}

/// True: the restore would be accepted.
pub fn run(args: &PlanArgs) -> Result<bool> {
    let config = Config::load()
        .map_err(Failure::from)
        .map_err(|failure| anyhow::anyhow!("{failure}"))?;
    let result = decide(args, &config)?;
    if args.json {
        let gpus = result.as_ref().ok().and_then(|accepted| accepted.gpus.as_ref());
        println!(
            "{:#}",
            json!({
                "accepted": result.is_ok(),
                "map": gpus.map(|(decision, _)| &decision.map),
                "basis": gpus.map(|(decision, _)| basis(decision)),
                "warnings": gpus.map(|(decision, _)| &decision.warnings),
                "failure": result.as_ref().err(),
            })
        );
    } else {
        match &result {
            Ok(accepted) => print(accepted),
            Err(failure) => println!("{failure}"),
        }
    }
    Ok(result.is_ok())
}

/// What the shim would decide at Create. The outer error is a failure to ask, not an answer.
fn decide(args: &PlanArgs, config: &Config) -> Result<Result<Accepted, Failure>> {
    let (spec, manifest) = match read(args, config) {
        Ok(both) => both,
        Err(failure) => return Ok(Err(failure)),
    };
    let Some(manifest) = manifest.filter(Manifest::has_gpu_state) else {
        return Ok(Ok(Accepted {
            manifest: None,
            gpus: None,
        }));
    };
    let inventory = match &args.inventory {
        Some(file) => program::read_inventory(file)?,
        None => program::inventory(config).context("cannot read the GPUs of this node")?,
    };
    let bundle = args.spec.parent().unwrap_or(Path::new("."));
    let decision = Decision::make(&spec, &manifest, &inventory, &config.restore)
        .map_err(Failure::from)
        .and_then(|decision| {
            let by_cdi = Registry::read(&config.create.cdi_dirs).library_dirs();
            let by_cdi = by_cdi.iter().filter_map(|dir| dir.to_str());
            let dirs: Vec<&str> = mounts::LIBRARY_DIRS.into_iter().chain(by_cdi).collect();
            let driver = mounts::Driver {
                version: &inventory.driver_version,
                dirs: &dirs,
            };
            let empty = bundle.join(firn_config::names::BUNDLE_EMPTY);
            mounts::settle(&mut spec.clone(), bundle, &manifest.mounts, driver, &empty)
                .map(|_| decision)
                .map_err(Failure::from)
        });
    Ok(decision.map(|decision| Accepted {
        manifest: Some(manifest),
        gpus: Some((decision, inventory)),
    }))
}

fn read(args: &PlanArgs, config: &Config) -> Result<(Spec, Option<Manifest>), Failure> {
    let spec = created(Spec::load_file(&args.spec)?, config)?;
    let manifest = Manifest::read_for(&spec, &args.dir)?;
    if let Some(manifest) = &manifest {
        manifest.verify_images(&args.dir)?;
    }
    Ok((spec, manifest))
}

/// The spec as the shim would make it at Create.
fn created(spec: Spec, config: &Config) -> Result<Spec, Failure> {
    match Ask::of(&spec) {
        Ask::Request(request) if request.form.counts(&config.create) => {
            Ok(firn_cdi::convert(spec, config, true)?.0)
        }
        Ask::Request(_) | Ask::Nodes | Ask::Nothing => Ok(spec),
    }
}

fn print(accepted: &Accepted) {
    let (Some(manifest), Some((decision, inventory))) = (&accepted.manifest, &accepted.gpus) else {
        println!("the checkpoint holds no GPU state: it would be restored as runc alone would");
        return;
    };
    println!("driver  {} on both sides", inventory.driver_version);
    println!("grant   {}", basis(decision));
    for pair in decision.map.pairs() {
        let old = manifest.gpus.iter().find(|gpu| gpu.uuid == pair.old);
        let new = inventory.gpus.iter().find(|gpu| gpu.uuid == pair.new);
        let name = old.map_or("", |gpu| &gpu.name);
        let minor = new.map_or_else(String::new, |gpu| {
            format!(" (minor {}, {})", gpu.minor, gpu.pci_address)
        });
        println!("gpu     {} {name} -> {}{minor}", pair.old, pair.new);
    }
    for warning in &decision.warnings {
        println!("warning {warning}");
    }
}

fn basis(decision: &Decision) -> String {
    match decision.grant.basis {
        Basis::Nodes => "by the device nodes of the spec".to_owned(),
        Basis::Everything => "every GPU: the spec's device rules open them all".to_owned(),
        Basis::Config => "by [restore] gpus in the configuration".to_owned(),
        Basis::Map(origin) => format!("by the {origin}"),
    }
}
