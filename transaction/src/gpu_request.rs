//! GPUs that a container requests by a hook or by name become edits of its spec, before the runtime reads it.
//!
//! The request is read here, from the spec alone. The edits come from the node's CDI files, which
//! `firn-hook convert` reads in a process of its own: the shim has no YAML parser. The edited spec is read
//! and checked again before it is used.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use firn_config::{Config, Keys, Toolkit, find_program, names};
use firn_host::{Problem, ProblemLine, ProblemReport};
use firn_oci::{GpuRequest, NamedGpus, RequestSource, Rules, Spec, requests_beyond_gpus};
use serde::Deserialize;

use firn_process::reaper::{Output, OutputError, Reaper};

/// How long the helper may take. It reads some small files.
const LIMIT: Duration = Duration::from_secs(30);

/// A container cannot get the GPUs that it requests. Nothing has been started.
#[derive(Debug, thiserror::Error)]
pub enum GpuRequestError {
    #[error(transparent)]
    Problem(ProblemReport),
    /// The report of `firn-hook convert`.
    #[error(
        "{}: cannot give the container the GPUs that it asks for ({requested}): {}. hint: {}",
        report.code,
        report.message,
        report.hint
    )]
    Refused {
        requested: String,
        report: ProblemReport,
    },
    #[error(
        "FIRN-CDI-KIND: CDI device {name} is no GPU. hint: let containerd give other CDI devices: \
         `ctr run --device`, or a device plugin"
    )]
    Foreign { name: String },
    #[error(
        "FIRN-CONVERT: cannot run firn-hook: {}. hint: see that firn-hook is of the shim's version",
        firn_host::Chain(.0)
    )]
    Run(OutputError),
    #[error(
        "FIRN-CONVERT: firn-hook convert failed: {output}. hint: see that firn-hook is of the shim's version"
    )]
    Helper { output: String },
}

/// The code of `firn-hook convert` for a node without any CDI file of the kind.
const NO_SPEC: &str = "FIRN-NO-CDI-SPEC";

fn problem(problem: impl Problem) -> GpuRequestError {
    GpuRequestError::Problem(problem.report())
}

impl GpuRequestError {
    fn is_no_spec(&self) -> bool {
        matches!(self, Self::Refused { report, .. } if report.code == NO_SPEC)
    }
}

/// A container's spec with its GPU request applied.
pub struct ResolvedSpec {
    pub spec: Spec,
    /// The OCI runtime to call instead of NVIDIA's wrapper of it, which has nothing left to do and must not
    /// edit the spec.
    pub runtime: Option<String>,
    /// Whether it gets GPUs.
    pub gpu: bool,
}

/// Applies the GPU request of a spec. A spec without a request stays as it is, and so does one whose kind of
/// request the configuration does not enable.
pub(crate) async fn resolve(
    spec: Spec,
    bundle: &Path,
    wrapper: Option<&Path>,
    restores: bool,
    reaper: &Reaper,
) -> Result<ResolvedSpec, GpuRequestError> {
    let rules = Rules::of(&spec, wrapper).map_err(problem)?;
    let requested = GpuRequest::of(&spec, &rules);
    let mut runtime = None;
    if let Rules::Wrapper(toolkit) = &rules {
        runtime = toolkit.runtime().map(|path| path.to_string_lossy().into_owned());
        // At a restore the wrapper adds no GPUs.
        if !restores
            && let Some(reason) = not_ours(toolkit, &spec, runtime.is_some())
            && requested != GpuRequest::None
        {
            refuse_other_kinds(&requested)?;
            log::warn!(
                "the container's GPUs are left to NVIDIA's container runtime, because firn does not follow \
                 {reason}"
            );
            return Ok(ResolvedSpec::unchanged(spec, true));
        }
    }
    let request = match requested {
        GpuRequest::Named(request) => request,
        GpuRequest::Nodes => return Ok(ResolvedSpec::with_gpus(spec, runtime)),
        GpuRequest::None => return Ok(ResolvedSpec::unchanged(spec, false)),
    };
    let is_hook = request.source.is_hook();
    let Some(config) = config_that_enables(&request, restores)? else {
        return Ok(ResolvedSpec::unchanged(spec, is_hook));
    };
    let output = convert(&config, bundle, wrapper, restores, reaper).await?;
    if !output.success() {
        let error = refused(&request, &output.stdout, &output.stderr);
        if is_hook && !restores && error.is_no_spec() {
            log::warn!("{error}. {}", kept(request.source));
            return Ok(ResolvedSpec::unchanged(spec, true));
        }
        if !is_hook && !spec.gpu_nodes().is_empty() {
            log::warn!("{error}. The container has its device nodes, and nothing is added to them");
            return Ok(ResolvedSpec::with_gpus(spec, runtime));
        }
        return Err(error);
    }
    let given: Given = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let converted = Spec::load(bundle).map_err(problem)?;
    match (given.devices.is_empty(), converted.gpu_nodes().is_empty()) {
        (true, true) => return Ok(ResolvedSpec::unchanged(spec, is_hook)),
        (true, false) => {}
        (false, false) => log::info!("{}", summary(&request, &given)),
        (false, true) => {
            return Err(GpuRequestError::Helper {
                output: "the spec has no GPU".to_owned(),
            });
        }
    }
    Ok(ResolvedSpec::with_gpus(converted, runtime))
}

/// The configuration, if it enables this kind of request. One with a mistake enables none: a new container
/// starts without the GPUs, and a restore is refused.
fn config_that_enables(request: &NamedGpus, restores: bool) -> Result<Option<Config>, GpuRequestError> {
    let keys = if restores {
        Keys::RESTORED_GPU_REQUEST
    } else {
        Keys::GPU_REQUEST
    };
    match Config::load(keys) {
        Ok(config) => Ok(Some(config).filter(|config| request.source.is_enabled(&config.create))),
        Err(error) if restores => Err(problem(error)),
        Err(error) => {
            log::warn!("{}. {}", ProblemLine(&error), kept(request.source));
            Ok(None)
        }
    }
}

/// Runs `firn-hook convert`, which edits the spec in the bundle.
async fn convert(
    config: &Config,
    bundle: &Path,
    wrapper: Option<&Path>,
    restores: bool,
    reaper: &Reaper,
) -> Result<Output, GpuRequestError> {
    let hook = find_program(names::HOOK_PROGRAM, config.hook.path.as_deref()).map_err(problem)?;
    let mut command = Command::new(hook);
    command.arg("convert").arg(bundle);
    if restores {
        command.arg("--restore");
    }
    if let Some(wrapper) = wrapper {
        command.arg("--wrapper").arg(wrapper);
    }
    let output = reaper.output(&mut command, LIMIT).await;
    output.map_err(GpuRequestError::Run)
}

impl ResolvedSpec {
    /// GPUs are in the spec.
    fn with_gpus(spec: Spec, runtime: Option<String>) -> Self {
        let gpu = spec.requests_gpu();
        Self { spec, runtime, gpu }
    }

    /// The spec stays as it is; NVIDIA's runtime or hook may give the container GPUs.
    fn unchanged(spec: Spec, may_get: bool) -> Self {
        let gpu = may_get || spec.requests_gpu();
        Self {
            spec,
            runtime: None,
            gpu,
        }
    }
}

/// Refuses CDI devices other than GPUs: NVIDIA's wrapper would give them to any container that names them.
fn refuse_other_kinds(request: &GpuRequest) -> Result<(), GpuRequestError> {
    let GpuRequest::Named(request) = request else {
        return Ok(());
    };
    match request.other_kinds().next() {
        None => Ok(()),
        Some(name) => Err(GpuRequestError::Foreign {
            name: name.to_owned(),
        }),
    }
}

/// Why NVIDIA's wrapper has to create a container, by its configuration or by what it would give in addition
/// to GPUs.
fn not_ours(toolkit: &Toolkit, spec: &Spec, has_runtime: bool) -> Option<&'static str> {
    let no_runtime = (!has_runtime).then_some("its choice of a runtime");
    toolkit
        .not_followed
        .or_else(|| requests_beyond_gpus(spec))
        .or(no_runtime)
}

/// What the helper prints when it is done.
#[derive(Default, Deserialize)]
struct Given {
    devices: Vec<String>,
    /// Device nodes of the CDI devices that the container's own device nodes do not grant.
    #[serde(default)]
    left_out: Vec<String>,
}

fn kept(source: RequestSource) -> &'static str {
    match source {
        RequestSource::Wrapper => {
            "NVIDIA's container runtime gives it the GPUs; with its hook it cannot be checkpointed"
        }
        source if source.is_hook() => "The container keeps its hook, and cannot be checkpointed",
        _ => "The container gets no GPU for what it names",
    }
}

fn refused(request: &NamedGpus, stdout: &[u8], stderr: &[u8]) -> GpuRequestError {
    match serde_json::from_slice(stdout) {
        Ok(report) => GpuRequestError::Refused {
            requested: request.devices.join(", "),
            report,
        },
        Err(_) => GpuRequestError::Helper {
            output: String::from_utf8_lossy(stderr).trim().to_owned(),
        },
    }
}

fn summary(request: &NamedGpus, given: &Given) -> String {
    let by = match request.source {
        RequestSource::Cli => "a hook that runs nvidia-container-cli",
        RequestSource::RuntimeHook => "a hook of NVIDIA's container runtime",
        RequestSource::Wrapper => "what NVIDIA's container runtime reads",
        RequestSource::Annotations => "annotations",
        RequestSource::Volumes => "mounts that stand for devices",
        RequestSource::Variable => "NVIDIA_VISIBLE_DEVICES",
    };
    let devices = given.devices.join(", ");
    let summary = format!(
        "{} requested by {by}: CDI devices {devices}",
        request.devices.join(", ")
    );
    if given.left_out.is_empty() {
        summary
    } else {
        format!(
            "{summary}, without {}, which the container's device nodes do not grant",
            given.left_out.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_of_another_kind_is_not_left_to_the_wrapper() {
        let request = |name: &str| {
            GpuRequest::Named(NamedGpus {
                source: RequestSource::Wrapper,
                devices: vec!["0".to_owned(), name.to_owned()],
            })
        };
        for accepted in [
            GpuRequest::None,
            GpuRequest::Nodes,
            request("nvidia.com/gpu=1"),
            request("runtime.nvidia.com/gpu=1"),
        ] {
            assert!(refuse_other_kinds(&accepted).is_ok(), "{accepted:?}");
        }
        let refused = refuse_other_kinds(&request("vendor.example/backup=host"))
            .unwrap_err()
            .to_string();
        assert!(
            refused.starts_with("FIRN-CDI-KIND: ") && refused.contains("vendor.example/backup=host"),
            "{refused}"
        );
    }

    #[test]
    fn devices_that_the_nodes_do_not_grant_are_logged() {
        let request = NamedGpus {
            source: RequestSource::Variable,
            devices: vec!["0".to_owned()],
        };
        let output = br#"{"devices": ["nvidia.com/gpu=0"], "left_out": ["/dev/dri/card1"]}"#;
        let given: Given = serde_json::from_slice(output).unwrap();
        assert!(
            summary(&request, &given)
                .ends_with("without /dev/dri/card1, which the container's device nodes do not grant")
        );
        let given: Given = serde_json::from_slice(br#"{"devices": ["nvidia.com/gpu=0"]}"#).unwrap();
        assert!(summary(&request, &given).ends_with("CDI devices nvidia.com/gpu=0"));
    }

    #[test]
    fn the_helpers_refusal_is_passed_on_and_its_nonsense_is_not() {
        let request = NamedGpus {
            source: RequestSource::Cli,
            devices: vec!["0".to_owned(), "1".to_owned()],
        };
        let output = br#"{"code":"FIRN-NO-CDI-SPEC","message":"none","hint":"make one"}"#;
        let error = refused(&request, output, b"");
        assert!(error.is_no_spec());
        assert_eq!(
            error.to_string(),
            "FIRN-NO-CDI-SPEC: cannot give the container the GPUs that it asks for (0, 1): none. \
             hint: make one"
        );
        let nonsense = refused(&request, b"", b"wrong usage\n").to_string();
        assert!(nonsense.starts_with("FIRN-CONVERT: ") && nonsense.contains(": wrong usage. "));
    }
}
