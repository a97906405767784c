use super::*;

#[test]
fn uuids_are_read_in_one_form_and_keep_their_bytes() {
    let text = "GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a50";
    let uuid: GpuUuid = text.parse().unwrap();
    assert_eq!(uuid.as_str(), text);
    let bytes = [
        0x6a, 0x1f, 0x0c, 0x52, 0x90, 0xc1, 0x4f, 0x0e, 0x8d, 0x7b, 0x0c, 0x1d, 0x2e, 0x3f, 0x4a, 0x50,
    ];
    assert_eq!(uuid.to_bytes(), bytes);
    assert_eq!(GpuUuid::from_bytes(bytes), uuid);
    assert_eq!(
        "GPU-6A1F0C52-90C1-4F0E-8D7B-0C1D2E3F4A50"
            .parse::<GpuUuid>()
            .unwrap(),
        uuid
    );
    for bad in [
        "",
        "GPU-",
        "6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a50",
        "MIG-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a50",
        "GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a5",
        "GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a500",
        "GPU-6a1f0c52090c1-4f0e-8d7b-0c1d2e3f4a50",
        "GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4ag0",
        "GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4\u{e9}0",
    ] {
        assert!(bad.parse::<GpuUuid>().is_err(), "{bad}");
    }
}

/// Leases on nodes that run have it.
#[test]
fn the_id_of_a_device_is_written_as_a_list() {
    let id = DeviceId {
        kind: NodeType::Char,
        major: 195,
        minor: 2,
    };
    let text = r#"["c",195,2]"#;
    assert_eq!(serde_json::to_string(&id).unwrap(), text);
    assert_eq!(serde_json::from_str::<DeviceId>(text).unwrap(), id);
}
