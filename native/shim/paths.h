/* Finds a library that may be in one of several places, since a container may have it in another place than the
 * host. */
#ifndef COTENANT_PATHS_H
#define COTENANT_PATHS_H

#include <string.h>
#include <unistd.h>

#define COTENANT_PATH_BYTES 4096

/* Finds the first readable file in a colon-separated list of absolute paths. Returns its path, which is stored in
 * `found`; NULL if no file in the list is readable. */
static inline const char *cot_first_file(const char *list, char found[COTENANT_PATH_BYTES])
{
    while (list && *list) {
        size_t length = strcspn(list, ":");
        if (list[0] == '/' && length < COTENANT_PATH_BYTES) {
            memcpy(found, list, length);
            found[length] = '\0';
            if (access(found, R_OK) == 0)
                return found;
        }
        list += length + (list[length] == ':');
    }
    return NULL;
}

#endif
