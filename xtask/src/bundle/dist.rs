//! `cargo xtask dist`: a release, as operators get it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use firn_lab::PROGRAMS;
use firn_node::Image;

use super::arch::{Arch, Libc};
use super::{check, copy_into, deb, install_missing, mib, output, sbom, write_out};
use crate::workspace;

/// The packages whose programs are linked dynamically: those that open libraries, or are such a library.
const DYNAMIC: [&str; 5] = [
    "firn-worker",
    "firn-hook",
    "firn-runc",
    "firn",
    "firn-criu-plugin",
];
const PLUGIN: &str = "libfirn_criu.so";
/// A workspace of its own.
const CUDA_LIBRARY: &str = "libfirn_cuda.so";
const RUNC: &str = "firn-runc";
const SHIM: &str = "containerd-shim-firn-v2";

/// Make a release: for each processor an archive of the programs and a Debian package, and the image that
/// installs them in a cluster
///
/// Writes to DIR, for each processor, firn-VERSION-ARCH.tar.xz (the programs, config/ and LICENSE),
/// firn_VERSION_ARCH.deb (with manual pages, completions and units for systemd) and
/// firn-VERSION-ARCH.cdx.json (what they are built from, as CycloneDX has it); for this machine's processor
/// also image/ (what config/Containerfile copies) and firn-image-VERSION.tar (the same image without a
/// builder, for `ctr images import` or `skopeo copy oci-archive:`); and SHA256SUMS. For the other processor
/// it installs a C compiler and qemu with apt where they are missing. Every program is started once. Builds
/// map the paths of the sources; --twice shows whether the bytes are the same elsewhere.
#[derive(clap::Args)]
pub struct Cmd {
    /// Where the release is written
    #[arg(long, value_name = "DIR", default_value = "target/dist")]
    out: PathBuf,
    /// A processor; may be given twice. Default: both
    #[arg(long, value_name = "ARCH")]
    arch: Vec<Arch>,
    /// Make the release twice, the second time of a copy of the sources elsewhere, and compare
    #[arg(long)]
    twice: bool,
    /// Only make the Debian package, of the programs that are in this directory
    #[arg(long, value_name = "DIR", conflicts_with_all = ["arch", "twice"])]
    deb_of: Option<PathBuf>,
}

pub fn run(cmd: &Cmd) -> Result<()> {
    install_missing(&[("dpkg-deb", "dpkg"), ("readelf", "binutils"), ("xz", "xz-utils")])?;
    let workspace = workspace()?;
    if let Some(programs) = &cmd.deb_of {
        fs::create_dir_all(&cmd.out).with_context(|| format!("make {}", cmd.out.display()))?;
        let package = deb::build(&workspace, programs, &cmd.out, Arch::own()?)?;
        println!("{}", cmd.out.join(package).display());
        return Ok(());
    }
    let arches = match &cmd.arch[..] {
        [] => &Arch::ALL[..],
        some => some,
    };
    let out = workspace.join(&cmd.out);
    let commit = commit(&workspace).ok();
    let sources = Sources {
        dir: &workspace,
        commit: commit.as_deref(),
    };
    let sums = release(sources, &out, arches)?;
    print!("{sums}");
    if cmd.twice {
        let copy = tempfile::tempdir_in(workspace.join("target"))?;
        let dir = &copy.path().join("sources");
        copy_sources(&workspace, dir)?;
        let again = release(Sources { dir, ..sources }, &copy.path().join("out"), arches)?;
        ensure!(again == sums, "the second time the sums were\n{again}");
        println!("the same bytes the second time");
    }
    Ok(())
}

/// What a release is made of.
#[derive(Clone, Copy)]
struct Sources<'a> {
    dir: &'a Path,
    /// Their commit, which the programs show; none of sources without git.
    commit: Option<&'a str>,
}

/// The commit, with a plus sign if the sources are not as it has them.
fn commit(workspace: &Path) -> Result<String> {
    let git = |words: &[&str]| output(Command::new("git").args(words).current_dir(workspace));
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    let mark = if changed.is_empty() { "" } else { "+" };
    Ok(format!("{}{mark}", git(&["rev-parse", "HEAD"])?.trim()))
}

/// Makes the release. Returns the sums of its files.
fn release(sources: Sources<'_>, out: &Path, arches: &[Arch]) -> Result<String> {
    fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
    let mut files = Vec::new();
    for arch in arches {
        files.extend(for_arch(sources, out, *arch)?);
    }
    let sums = output(Command::new("sha256sum").args(&files).current_dir(out))?;
    fs::write(out.join("SHA256SUMS"), &sums)?;
    Ok(sums)
}

/// Makes what is for this processor. Returns the names of the files.
fn for_arch(sources: Sources<'_>, out: &Path, arch: Arch) -> Result<Vec<String>> {
    arch.prepare()?;
    let workspace = sources.dir;
    let version = env!("CARGO_PKG_VERSION");
    let stage = tempfile::tempdir()?;
    let name = format!("firn-{version}-{arch}");
    let programs = stage.path().join(&name);
    build_programs(sources, &programs, arch)?;
    start(&programs, arch)?;
    for file in ["LICENSE", "config"] {
        check(
            Command::new("cp")
                .args(["-a", "--"])
                .arg(workspace.join(file))
                .arg(&programs),
        )?;
    }
    let archive = format!("{name}.tar.xz");
    let packed = write_out(stage.path(), &out.join(&archive))?;
    println!("{archive}: {}", mib(packed));
    let package = deb::build(workspace, &programs, out, arch)?;
    let sbom = format!("{name}.cdx.json");
    let target = arch.target(Libc::Gnu);
    fs::write(out.join(&sbom), sbom::document(workspace, &target)?)?;
    let mut files = vec![archive, package, sbom];
    if arch.is_own() {
        // The image has no C library of the node.
        let fixed = build(sources, arch, Libc::Musl, &["firn"])?;
        files.push(image(out, &programs, &fixed.join("firn"))?);
    }
    Ok(files)
}

/// Copies the files that git has, as they are now.
fn copy_sources(workspace: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    let copy = "git ls-files -z | tar --null -T - -c | tar -x -C \"$0\"";
    check(
        Command::new("sh")
            .args(["-euc", copy])
            .arg(to)
            .current_dir(workspace),
    )
}

/// Makes the image, and the directory of which config/Containerfile makes it. Returns the archive's name.
fn image(out: &Path, release: &Path, fixed: &Path) -> Result<String> {
    let image = out.join("image");
    if image.exists() {
        fs::remove_dir_all(&image)?;
    }
    fs::create_dir_all(image.join("release"))?;
    copy_into(fixed, &image)?;
    for name in PROGRAMS {
        copy_into(&release.join(name), &image.join("release"))?;
    }
    let work = tempfile::tempdir()?;
    let version = env!("CARGO_PKG_VERSION");
    let reference = format!("registry.example/firn:{version}");
    let built = Image::new(reference).entrypoint("/firn").command(&[]);
    let packed = built.archive(&image, work.path())?;
    let name = format!("firn-image-{version}.tar");
    let archive = out.join(&name);
    fs::copy(packed, &archive)?;
    println!("{}: {}", archive.display(), mib(fs::metadata(&archive)?.len()));
    Ok(name)
}

/// Builds the programs into the directory.
fn build_programs(sources: Sources<'_>, release: &Path, arch: Arch) -> Result<()> {
    fs::create_dir_all(release)?;
    // By itself: packages that are built together get the features that any of them asks for.
    let fixed = build(sources, arch, Libc::Musl, &["firn-shim"])?;
    copy_into(&fixed.join(SHIM), release)?;
    let built = build(sources, arch, Libc::Gnu, &DYNAMIC)?;
    let elsewhere = [SHIM, CUDA_LIBRARY];
    for name in PROGRAMS.into_iter().filter(|name| !elsewhere.contains(name)) {
        copy_into(&built.join(name), release)?;
    }
    copy_into(&build_cuda_library(sources, arch)?, release)?;
    Ok(())
}

/// Builds the packages and returns the directory with their programs.
fn build(sources: Sources<'_>, arch: Arch, libc: Libc, packages: &[&str]) -> Result<PathBuf> {
    let mut cargo = cargo_build(sources, arch, libc, &[])?;
    cargo.args(packages.iter().flat_map(|package| ["--package", package]));
    check(&mut cargo)?;
    let target = sources.dir.join("target").join(arch.target(libc));
    Ok(target.join("release"))
}

/// Builds the library that stands between programs and libcuda. Returns the file.
fn build_cuda_library(sources: Sources<'_>, arch: Arch) -> Result<PathBuf> {
    // Atomics of Arm's first processors come from a library, which asks the C library which one it is.
    let flags: &[&str] = match arch {
        Arch::X86 => &[],
        Arch::Arm => &["-Ctarget-feature=-outline-atomics"],
    };
    let mut cargo = cargo_build(sources, arch, Libc::Gnu, flags)?;
    let target = sources.dir.join("target/interposer");
    let manifest = sources.dir.join("interposer/library/Cargo.toml");
    cargo
        .arg("--manifest-path")
        .arg(manifest)
        .arg("--target-dir")
        .arg(&target);
    check(&mut cargo)?;
    let built = target.join(arch.target(Libc::Gnu)).join("release");
    Ok(built.join(CUDA_LIBRARY))
}

/// `cargo build` of a release, with more flags for the compiler.
fn cargo_build(sources: Sources<'_>, arch: Arch, libc: Libc, flags: &[&str]) -> Result<Command> {
    let workspace = sources.dir;
    arch.add_target(libc, workspace)?;
    let target = arch.target(libc);
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(std::env::home_dir()?.join(".cargo")));
    let home = home.context("find cargo's directory")?;
    // Where sources lie stands in messages of panics.
    let mapped = [(home.as_path(), "/cargo"), (workspace, "/firn")]
        .map(|(from, to)| format!("\"--remap-path-prefix={}={to}\"", from.display()));
    let flags = flags.iter().map(|flag| format!("\"{flag}\""));
    let flags: Vec<String> = mapped.into_iter().chain(flags).collect();
    let flags = format!("target.{target}.rustflags=[{}]", flags.join(","));
    let mut cargo = arch.cargo(libc);
    cargo.args([
        "build",
        "--release",
        "--locked",
        "--target",
        &target,
        "--config",
        &flags,
    ]);
    cargo
        .env_remove("FIRN_COMMIT")
        .envs(sources.commit.map(|commit| ("FIRN_COMMIT", commit)));
    cargo.current_dir(workspace).env_remove("CARGO_TARGET_DIR");
    Ok(cargo)
}

/// Starts every program, on qemu where this machine is another one.
fn start(programs: &Path, arch: Arch) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    for name in PROGRAMS {
        let program = programs.join(name);
        arch.check(&program)?;
        let (option, expected) = match name {
            PLUGIN | CUDA_LIBRARY => continue,
            SHIM => ("-v", version),
            // It becomes runc, and there is none in this PATH.
            RUNC => ("--version", "FIRN-RUNC-MISSING"),
            _ => ("--version", version),
        };
        let started = arch.run(&program).arg(option).env("PATH", "/").output();
        let started = started.with_context(|| format!("start {name}"))?;
        let shown = [started.stdout, started.stderr].concat();
        let shown = String::from_utf8_lossy(&shown);
        ensure!(
            shown.contains(expected),
            "{name} {option}: {}: {shown:?}",
            started.status
        );
    }
    println!("{arch}: every program starts");
    Ok(())
}
