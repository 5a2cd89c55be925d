/* Reads CUDA_VISIBLE_DEVICES: numbers, UUIDs or unambiguous prefixes of UUIDs, separated by commas. The list ends
 * before the first entry that names no device, or names one a second time. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "softgpu.h"
#include "visible.h"

#define UUID_TEXT 41 /* length of the text "GPU-" with a UUID and the final NUL */

static int visible[SOFT_MAX_DEVICES];
static int count;
static bool was_read;

static void uuid_text(int device, char text[UUID_TEXT])
{
    uint8_t bytes[16];
    soft_uuid(device, bytes);
    char *end = text + sprintf(text, "GPU");
    for (int i = 0; i < 16; i++)
        end += sprintf(end, "%s%02x", i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", bytes[i]);
}

static int by_uuid(const char *entry, size_t length)
{
    int found = -1;
    for (int device = 0; device < (int)soft_state()->device_count; device++) {
        char text[UUID_TEXT];
        uuid_text(device, text);
        if (length < sizeof text && strncasecmp(entry, text, length) == 0) {
            if (found >= 0)
                return -1; /* the prefix is ambiguous */
            found = device;
        }
    }
    return found;
}

static int device_named(const char *entry, size_t length)
{
    if (length > 4 && strncmp(entry, "GPU-", 4) == 0)
        return by_uuid(entry, length);
    char *end;
    if (length == 0 || !isdigit((unsigned char)entry[0]))
        return -1;
    unsigned long number = strtoul(entry, &end, 10);
    return end == entry + length && number < soft_state()->device_count ? (int)number : -1;
}

static void add_all(void)
{
    for (count = 0; count < (int)soft_state()->device_count; count++)
        visible[count] = count;
}

void soft_read_visible(void)
{
    const char *entry = getenv("CUDA_VISIBLE_DEVICES");
    if (was_read)
        return;
    was_read = true;
    if (!entry) {
        add_all();
        return;
    }
    for (;;) {
        entry += strspn(entry, " ");
        size_t whole = strcspn(entry, ","), length = whole;
        while (length > 0 && entry[length - 1] == ' ')
            length--;
        int device = device_named(entry, length);
        if (device < 0 || soft_ordinal_of(device) >= 0)
            return;
        visible[count++] = device;
        if (!entry[whole])
            return;
        entry += whole + 1;
    }
}

int soft_visible_count(void)
{
    return count;
}

int soft_device_at(int ordinal)
{
    return soft_ready && ordinal >= 0 && ordinal < count ? visible[ordinal] : -1;
}

int soft_ordinal_of(int device)
{
    for (int i = 0; i < count; i++)
        if (visible[i] == device)
            return i;
    return -1;
}
