#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| firn_oci::fuzz::image(data));
