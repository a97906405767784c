//! `cargo xtask dist`: a release, as operators get it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use firn_node::Image;

use super::gpu::{build, have_target};
use super::{check, copy_into, mib, output, write_out};
use crate::tools::cargo;
use crate::workspace;

const MUSL: &str = "x86_64-unknown-linux-musl";
/// Without the shim, which is linked statically.
const PROGRAMS: [&str; 4] = ["firn-gpu", "firn-hook", "firn-runc", "firn"];
const PLUGIN: &str = "libfirn_criu.so";
const SHIM: &str = "containerd-shim-firn-v2";

/// Make a release: an archive of the programs, and the image that installs them in a cluster
///
/// Writes to DIR firn-VERSION-ARCH.tar.xz (the programs, config/ and LICENSE), image/ (what
/// config/Containerfile copies), firn-image-VERSION.tar (the same image without a builder, for `ctr images
/// import` or `skopeo copy oci-archive:`), and SHA256SUMS. The same sources make the same bytes with the same
/// compiler.
#[derive(clap::Args)]
pub struct Cmd {
    /// Where the release is written
    #[arg(long, value_name = "DIR", default_value = "target/dist")]
    out: PathBuf,
}

pub fn run(cmd: &Cmd) -> Result<()> {
    let workspace = workspace()?;
    ensure!(
        have_target(&workspace, MUSL)?,
        "the static programs need the target {MUSL}\nhint: rustup target add {MUSL}"
    );
    let out = workspace.join(&cmd.out);
    fs::create_dir_all(&out).with_context(|| format!("make {}", out.display()))?;
    let version = env!("CARGO_PKG_VERSION");
    let stage = tempfile::tempdir()?;
    let name = format!("firn-{version}-{}", std::env::consts::ARCH);
    let release = stage.path().join(&name);
    let fixed = programs(&workspace, &release)?;
    for file in ["LICENSE", "config"] {
        check(
            Command::new("cp")
                .args(["-a", "--"])
                .arg(workspace.join(file))
                .arg(&release),
        )?;
    }
    let archive = out.join(format!("{name}.tar.xz"));
    let packed = write_out(stage.path(), &archive)?;
    println!("{}: {}", archive.display(), mib(packed));

    let image = out.join("image");
    if image.exists() {
        fs::remove_dir_all(&image)?;
    }
    fs::create_dir_all(image.join("release"))?;
    copy_into(&fixed, &image)?;
    for name in PROGRAMS.into_iter().chain([SHIM, PLUGIN]) {
        copy_into(&release.join(name), &image.join("release"))?;
    }
    let work = tempfile::tempdir()?;
    let reference = format!("registry.example/firn:{version}");
    let built = Image::new(reference).entrypoint("/firn").command(&[]);
    let packed = built.archive(&image, work.path())?;
    let archive = out.join(format!("firn-image-{version}.tar"));
    fs::copy(packed, &archive)?;
    println!("{}: {}", archive.display(), mib(fs::metadata(&archive)?.len()));
    sums(
        &out,
        &[format!("{name}.tar.xz"), format!("firn-image-{version}.tar")],
    )
}

/// Builds the programs into the directory. Returns the statically linked `firn`, for an image that has no C
/// library.
fn programs(workspace: &Path, release: &Path) -> Result<PathBuf> {
    fs::create_dir_all(release)?;
    let fixed = build(workspace, &[SHIM, "firn"], Some(MUSL))?;
    copy_into(&fixed.join(SHIM), release)?;
    let built = build(workspace, &PROGRAMS, None)?;
    let plugin = ["build", "--release", "--locked", "--package", "firn-criu-plugin"];
    check(cargo().args(plugin).current_dir(workspace))?;
    for name in PROGRAMS.into_iter().chain([PLUGIN]) {
        copy_into(&built.join(name), release)?;
    }
    Ok(fixed.join("firn"))
}

fn sums(out: &Path, files: &[String]) -> Result<()> {
    let sums = output(Command::new("sha256sum").args(files).current_dir(out))?;
    fs::write(out.join("SHA256SUMS"), &sums)?;
    print!("{sums}");
    Ok(())
}
