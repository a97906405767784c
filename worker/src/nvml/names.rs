//! Names of the `nvmlReturn_t` numbers of nvml.h (CUDA 13.5).

/// Name of `code`, if the header has one.
pub(super) fn name(code: i32) -> Option<&'static str> {
    let at = NAMES.binary_search_by_key(&code, |(number, _)| *number).ok()?;
    Some(NAMES[at].1)
}

const NAMES: &[(i32, &str)] = &[
    (0, "NVML_SUCCESS"),
    (1, "NVML_ERROR_UNINITIALIZED"),
    (2, "NVML_ERROR_INVALID_ARGUMENT"),
    (3, "NVML_ERROR_NOT_SUPPORTED"),
    (4, "NVML_ERROR_NO_PERMISSION"),
    (5, "NVML_ERROR_ALREADY_INITIALIZED"),
    (6, "NVML_ERROR_NOT_FOUND"),
    (7, "NVML_ERROR_INSUFFICIENT_SIZE"),
    (8, "NVML_ERROR_INSUFFICIENT_POWER"),
    (9, "NVML_ERROR_DRIVER_NOT_LOADED"),
    (10, "NVML_ERROR_TIMEOUT"),
    (11, "NVML_ERROR_IRQ_ISSUE"),
    (12, "NVML_ERROR_LIBRARY_NOT_FOUND"),
    (13, "NVML_ERROR_FUNCTION_NOT_FOUND"),
    (14, "NVML_ERROR_CORRUPTED_INFOROM"),
    (15, "NVML_ERROR_GPU_IS_LOST"),
    (16, "NVML_ERROR_RESET_REQUIRED"),
    (17, "NVML_ERROR_OPERATING_SYSTEM"),
    (18, "NVML_ERROR_LIB_RM_VERSION_MISMATCH"),
    (19, "NVML_ERROR_IN_USE"),
    (20, "NVML_ERROR_MEMORY"),
    (21, "NVML_ERROR_NO_DATA"),
    (22, "NVML_ERROR_VGPU_ECC_NOT_SUPPORTED"),
    (23, "NVML_ERROR_INSUFFICIENT_RESOURCES"),
    (24, "NVML_ERROR_FREQ_NOT_SUPPORTED"),
    (25, "NVML_ERROR_ARGUMENT_VERSION_MISMATCH"),
    (26, "NVML_ERROR_DEPRECATED"),
    (27, "NVML_ERROR_NOT_READY"),
    (28, "NVML_ERROR_GPU_NOT_FOUND"),
    (29, "NVML_ERROR_INVALID_STATE"),
    (30, "NVML_ERROR_RESET_TYPE_NOT_SUPPORTED"),
    (999, "NVML_ERROR_UNKNOWN"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_sorted_and_known_ones_have_their_names() {
        assert!(NAMES.is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!(name(3), Some("NVML_ERROR_NOT_SUPPORTED"));
        assert_eq!(name(9), Some("NVML_ERROR_DRIVER_NOT_LOADED"));
        assert_eq!(name(999), Some("NVML_ERROR_UNKNOWN"));
        assert_eq!(name(998), None);
    }
}
